"""`pytest --hpctrain my-package`: a test for each plugin of an installed distribution, made of the kit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_OPTION = "--hpctrain"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --hpctrain."""
    parser.addoption(
        _OPTION,
        action="append",
        default=[],
        metavar="DISTRIBUTION",
        help="test each hpctrain plugin of this distribution",
    )
    parser.addini("kit_jobs", "TOML file with a table of job tables for each SLOT.NAME that needs options", default="")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Refuse a distribution without plugins."""
    for name in session.config.getoption(_OPTION):
        if not _names(name):
            raise pytest.UsageError(
                f"--hpctrain {name}: found no plugin of that distribution, expected one that is installed"
            )


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add a test for each plugin."""
    named = config.getoption(_OPTION)
    if named:
        collector = _Distributions.from_parent(session, name="hpctrain", path=Path(session.path))
        items += [item for name in named for item in collector.tests_of(name)]


class _Distributions(pytest.Collector):
    def collect(self) -> Iterator[pytest.Item]:
        return iter(())

    def tests_of(self, distribution: str) -> Iterator[pytest.Item]:
        for name in _names(distribution):
            yield _PluginTest.from_parent(self, name=f"{distribution}::{name}", plugin=name)


class _PluginTest(pytest.Item):
    def __init__(self, *, plugin: str, **others: Any) -> None:
        super().__init__(**others)
        self._plugin = plugin

    def runtest(self) -> None:
        from hpctrain.api import EnvironmentUnfitError
        from hpctrain.testing import check_plugin

        try:
            check_plugin(self._plugin, _jobs(self.config).get(self._plugin))
        except EnvironmentUnfitError as error:
            pytest.skip(str(error))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        from hpctrain.api import UsageError
        from hpctrain.testing import BrokenPromiseError

        sentence = isinstance(excinfo.value, (BrokenPromiseError, UsageError))
        return str(excinfo.value) if sentence else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, f"hpctrain kit: {self._plugin}"


def _jobs(config: pytest.Config) -> dict[str, Any]:
    """Job tables by plugin."""
    import tomli

    name = config.getini("kit_jobs")
    if not name:
        return {}
    found = tomli.loads((config.rootpath / name).read_text())
    return {f"{slot}.{plugin}": tables for slot, of in found.items() for plugin, tables in of.items()}


def _names(distribution: str) -> list[str]:
    """The installed plugins of a distribution, "slot.name"."""
    from hpctrain.registry.registry import build_registry

    wanted = distribution.lower().replace("_", "-")
    entries = build_registry(()).entries.items()
    return [
        f"{slot}.{name}" for (slot, name), one in entries if one.source.distribution.lower().replace("_", "-") == wanted
    ]
