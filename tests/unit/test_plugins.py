"""Discovery: real distributions on sys.path, working and not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpctrain.errors import EnvironmentUnfitError, UsageError
from hpctrain.plugins.listing import describe_options, list_plugins
from hpctrain.plugins.registry import Registry, build_registry

MODEL = """
from hpctrain.api import Field, ModelSpec, Options, hookimpl

class MyOptions(Options):
    width: int = Field(default=3, ge=1, description="how wide, in units")

class Mine(ModelSpec):
    "A model of a third party."
    name = "{name}"
    Options = MyOptions
    def build(self): ...
    def forward(self, module, batch): ...
    def count(self, batch): ...
    def loss(self, outputs, batch): ...

@hookimpl
def hpctrain_model():
    return [Mine]
"""


class Site:
    """A directory of installed distributions."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def install(self, distribution: str, entry_point: str, module: str, source: str, version: str = "1.2") -> None:
        (self.path / f"{module}.py").write_text(source)
        info = self.path / f"{distribution}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[hpctrain]\n{entry_point} = {module}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield Site(tmp_path)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "") or "").startswith(str(tmp_path)):
            del sys.modules[name]


def fault(registry: Registry, entry_point: str) -> str:
    return next(f.why for f in registry.faults if f.source.entry_point == entry_point)


def test_a_third_party_enters_through_the_door_of_the_first(site: Site) -> None:
    site.install("acme-hpc", "model.acme", "acme_models", MODEL.format(name="acme"))
    registry = build_registry()
    entry = registry.find("model", "acme")
    assert (entry.source.distribution, entry.source.version) == ("acme-hpc", "1.2")
    ours = registry.find("model", "gpt")
    assert ours.source.distribution == "hpctrain" and ours.source.entry_point == "model.gpt"
    (option,) = describe_options(entry.cls, registry)
    assert (option.key, option.type, option.default, option.help) == (
        "width", "integer >= 1", "default 3", "how wide, in units",
    )  # fmt: skip


def test_two_of_one_name_are_refused_by_both_names_and_only_when_used(site: Site) -> None:
    site.install("acme-hpc", "model.gpt", "acme_gpt", MODEL.format(name="gpt"))
    registry = build_registry()
    with pytest.raises(EnvironmentUnfitError) as error:
        registry.find("model", "gpt")
    assert "acme-hpc 1.2" in str(error.value) and "hpctrain_plugins.model.gpt" in str(error.value)
    assert registry.find("optimizer", "adamw")
    blocked = build_registry(block=["acme-hpc"])
    assert blocked.find("model", "gpt").source.distribution == "hpctrain"
    assert [row.state for row in list_plugins(registry) if row.name == "gpt"] == ["broken", "broken"]


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("1/0", "importing it raised ZeroDivisionError"),
        ("raise SystemExit(0)", "importing it raised SystemExit"),
        ("import no_such_package", "it needs the package 'no_such_package'"),
        ("x = 1", "it implements no hook"),
        (
            "HPCTRAIN_API = 2\n" + MODEL.format(name="m"),
            "asks for plugin API version 2, and this hpctrain has version 1",
        ),
        (MODEL.format(name="m").replace("def hpctrain_model()", "def hpctrain_model(self_made)"), "found (self_made)"),
        (MODEL.format(name="m").replace("def build(self): ...", ""), "Mine (m) lacks build"),
        (MODEL.format(name="m").replace('name = "m"', ""), "with a `name`"),
        (MODEL.format(name="m").replace("[Mine]", "Mine"), "expected a list of ModelSpec classes"),
        (MODEL.format(name="m").replace("[Mine]", "[object]"), "expected subclasses of ModelSpec"),
        (MODEL.format(name="m").replace("return [Mine]", "raise OSError('gone')"), "raised OSError: gone"),
    ],
)
def test_a_broken_plugin_is_a_fault_with_a_reason(site: Site, source: str, sentence: str) -> None:
    site.install("acme-hpc", "model.m", "acme_broken", source)
    registry = build_registry()
    assert sentence in fault(registry, "model.m")
    assert registry.find("model", "gpt"), "the others still work"
    with pytest.raises(EnvironmentUnfitError, match=r"acme-hpc 1\.2"):
        registry.find("model", "m")
    row = next(row for row in list_plugins(registry) if row.entry_point == "model.m")
    assert row.state == "broken" and sentence in row.why


def test_blocking_and_unknown_names() -> None:
    registry = build_registry(block=["hpctrain_plugins.model.gpt"])
    with pytest.raises(EnvironmentUnfitError, match="blocked"):
        registry.find("model", "gpt")
    with pytest.raises(UsageError, match=r"'adamv'; did you mean 'adam'\? \(installed: adam, adamw, adamw-8bit, sgd\)"):
        registry.find("optimizer", "adamv")


def test_every_first_party_plugin_is_active() -> None:
    registry = build_registry()
    assert not registry.faults and not registry.conflicts
    assert {slot for slot, _ in registry.entries} >= {
        "model", "dataset", "optimizer", "schedule", "sharding", "precision", "activation_checkpointing", "compression",
        "checkpoint", "communicator", "logger",
    }  # fmt: skip


def test_modules_with_hooks_only_are_listed(site: Site) -> None:
    site.install(
        "acme-hooks",
        "hooks.acme",
        "acme_hooks",
        "from hpctrain.api import hookimpl\n\n\n@hookimpl\ndef hpctrain_job_end(): ...\n",
    )
    (row,) = [row for row in list_plugins(build_registry()) if row.distribution == "acme-hooks"]
    assert (row.state, row.entry_point, row.why) == ("active", "hooks.acme", "life-cycle hooks")


def test_an_option_with_the_name_of_a_core_key_is_refused(site: Site) -> None:
    site.install("acme-hpc", "model.acme", "acme_models", MODEL.format(name="acme").replace("width:", "freeze:"))
    assert "(acme) has the options freeze, which are keys of the core" in fault(build_registry(), "model.acme")


def test_a_loaded_module_whose_hook_raises_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "raises_in_hook.py").write_text(
        "from hpctrain.api import hookimpl\n\n\n@hookimpl\ndef hpctrain_model():\n    raise ValueError('boom')\n"
    )
    with pytest.raises(
        EnvironmentUnfitError, match=r"\[plugins\] load: raises_in_hook .*hook hpctrain_model raised ValueError: boom"
    ):
        build_registry(["raises_in_hook"])
