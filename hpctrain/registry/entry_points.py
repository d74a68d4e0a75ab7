"""Plugin modules by their entry points, of the group `hpctrain`, and their import. Imports neither torch nor pydantic, which the
help of commands would wait for."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

from hpctrain.registry.hookspecs import PROJECT

COMMAND = "command"
"""The first part of the name of a command's entry point, "command.NAME"."""
RAISED = (Exception, SystemExit)
"""Exceptions of a third party's module that must not end the command which imports it."""


@dataclass(frozen=True)
class ModuleSource:
    """The origin of a plugin module."""

    module: str
    distribution: str = ""
    version: str = ""
    entry_point: str = ""
    """The entry point's name; by convention "slot.name", so that a broken module still shows what it would provide."""

    @property
    def command(self) -> str | None:
        """The command that the module provides, such as "bench mine" for "command.bench.mine"; None for other modules."""
        kind, _, path = self.entry_point.partition(".")
        return path.replace(".", " ") if kind == COMMAND and self.distribution else None

    @property
    def key(self) -> str:
        """The module's name in pluggy."""
        return f"{self.distribution}:{self.entry_point}" if self.distribution else self.module

    @property
    def names(self) -> set[str]:
        """The module's names in [plugins] block."""
        return {name for name in (self.entry_point, self.module, self.distribution) if name}

    def __str__(self) -> str:
        if not self.distribution:
            return f"{self.module} ([plugins] load)"
        return f"{self.module} ({self.distribution} {self.version}, entry point {self.entry_point!r})"


def entry_points() -> Iterator[ModuleSource]:
    """Every installed entry point of the group. A distribution that is installed twice counts once, as Python imports it."""
    listed = set()
    for distribution in importlib.metadata.distributions():  # in the order of sys.path
        points = [point for point in distribution.entry_points if point.group == PROJECT]
        if not points:
            continue  # most have none, and their metadata is long
        metadata = distribution.metadata  # parsed anew each time
        name = metadata["Name"]
        for point in points:
            if (name, point.name) not in listed:
                listed.add((name, point.name))
                yield ModuleSource(point.value, name, metadata["Version"], point.name)


def usable_module(source: ModuleSource, load: Callable[[str], ModuleType]) -> ModuleType | str:
    """The module, from `load`; a sentence if it cannot be imported."""
    try:
        return load(source.module)
    except ImportError as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        # else the module itself, or a package around it, is missing
        if missing and missing != source.module and not source.module.startswith(f"{missing}."):
            return f"it needs the package {missing!r}, which is not installed ({error})"
        return f"the module cannot be imported: {error}"
    except RAISED as error:
        return f"importing it raised {type(error).__name__}: {error}"
