"""Discovery: real distributions on sys.path, working and not."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import click
import pytest
from hpctrain_tools.listing import describe_options, list_plugins
from hpctrain_tools.submit.asking import Submitted
from hpctrain_tools.submit.record import Submission

from hpctrain.base.errors import EXIT_ENVIRONMENT, EnvironmentUnfitError, UsageError
from hpctrain.cli import cli, execute
from hpctrain.contracts.scheduler import JOB_FILE
from hpctrain.registry.registry import Registry, build_registry

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

API = "from hpctrain.api import *\nfrom hpctrain.api import hookimpl\n\n"


class Site:
    """A directory of installed distributions."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def install(self, distribution: str, entry_point: str, module: str, source: str, **submodules: str) -> None:
        """submodules: the sources of those of a package, by name."""
        files = {f"{module}/{name}": text for name, text in submodules.items()}
        files[f"{module}/__init__" if submodules else module] = source
        for name, text in files.items():
            (self.path / name).parent.mkdir(exist_ok=True)
            (self.path / f"{name}.py").write_text(text)
        info = self.path / f"{distribution}-1.2.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[hpctrain]\n{entry_point} = {module}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.syspath_prepend(str(tmp_path))
    return Site(tmp_path)


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
    site.install("acme-hpc", "model.theirs", "acme_theirs", MODEL.format(name="theirs"))
    site.install("bob-hpc", "model.theirs", "bob_theirs", MODEL.format(name="theirs"))
    registry = build_registry()
    with pytest.raises(EnvironmentUnfitError) as error:
        registry.find("model", "theirs")
    assert "acme-hpc 1.2" in str(error.value) and 'leave the other out with [plugins] block = ["acme_theirs"]' in str(
        error.value
    )
    assert registry.find("optimizer", "adamw") and not registry.notes()
    assert [row.state for row in list_plugins(registry) if row.name == "theirs"] == ["broken", "broken"]
    chosen = build_registry(block=["acme-hpc"])
    assert chosen.find("model", "theirs").source.distribution == "bob-hpc" and not chosen.notes()


@pytest.mark.parametrize(
    ("plugins", "said"),
    [
        ("block = ['bob-hpc']", "says acme-hpc"),
        ("block = ['acme-hpc']", "says bob-hpc"),
        ("block = 5", "claimed by"),
    ],
)
def test_a_submitted_job_is_asked_about_with_the_scheduler_that_it_chose(site: Site, plugins: str, said: str) -> None:
    for owner in ("acme", "bob"):
        body = "def render(self, launch): ...\ndef submit(self, script, launch): ...\ndef cancel(self, id, directory): ...\n"
        body += f"def state(self, id): return JobState('done', 'says {owner}-hpc')\n"
        site.install(f"{owner}-hpc", "scheduler.old", f"{owner}_queue", plugin("scheduler", "Scheduler", body))
    (site.path / JOB_FILE).write_text(f"[plugins]\n{plugins}\n")
    try:
        found = Submitted(site.path, Submission(target="old", id="1")).state().detail
    except EnvironmentUnfitError as error:
        found = str(error)
    assert said in found


def test_a_name_of_hpctrain_leaves_an_installed_plugin_alone(site: Site) -> None:
    """A name that is new in hpctrain may be an older one of another distribution, whose jobs must go on as before."""
    site.install("acme-hpc", "model.gpt", "acme_gpt", MODEL.format(name="gpt"))
    registry = build_registry()
    assert registry.find("model", "gpt").source.distribution == "acme-hpc"
    (line,) = registry.notes()
    assert (
        "hpctrain_plugins.model.gpt (hpctrain" in line
        and 'is not used; [plugins] block = ["acme-hpc"] takes the other' in line
    )
    assert [row.why.endswith("takes the other") for row in list_plugins(registry) if row.name == "gpt"] == [True]
    ours = build_registry(block=["acme-hpc"])
    assert ours.find("model", "gpt").source.distribution == "hpctrain" and not ours.notes()


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("1/0", "importing it raised ZeroDivisionError"),
        ("raise SystemExit(0)", "importing it raised SystemExit"),
        ("import no_such_package", "it needs the package 'no_such_package', which is not installed"),
        (
            "from hpctrain.api import NoSuchName",
            "the module cannot be imported: cannot import name 'NoSuchName' from 'hpctrain.api'",
        ),
        ("x = 1", "it implements no hook"),
        (MODEL.format(name="m").replace("def hpctrain_model", "def hpctrain_modell"), "did you mean 'hpctrain_model'?"),
        (MODEL.format(name="m").replace("def build", "def builds"), "Mine (m) lacks build"),
        (
            MODEL.format(name="m").replace("def hpctrain_model()", "def hpctrain_model(self_made)"),
            "{'self_made'} are declared",
        ),
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


def plugin(slot: str, bases: str, body: str, before: str = "") -> str:
    """A module with one class."""
    body = "".join(f"    {line}\n" for line in body.splitlines())
    return f"{API}{before}\nclass Old({bases}):\n    name = 'old'\n{body}\n@hookimpl\ndef hpctrain_{slot}():\n    return [Old]\n"


HELPERS = """
import functools
from torch import nn

class Net(nn.Module, ModelSpec):
    name = "net"
    def build(self): ...
    def forward(self, ids, mask): "Fits the contract, not nn.Module."
    def count(self, batch): ...
    def loss(self, outputs, batch): ...

def given(function):
    @functools.wraps(function)
    def inner(self, step, steps): return function(self, step, steps, 1)
    return inner

class Row(Schedule):
    name = "old"
    @given
    def factor(self, step, steps, more): return self.factors(step)
    def factors(self, step): "Close to a name that the class has."
    def figures(self): "A name of another contract."

def hpctrain_version(): "The name of no hook."

def __dir__(): return [*globals(), "hpctrain_metric"]
def __getattr__(name):
    "Makes it when asked, as lazy_loader does."
    if name != "hpctrain_metric": raise AttributeError(name)
    return hookimpl(specname=name)(lambda: [])

@hookimpl
def hpctrain_schedule(): return [Row]

@hookimpl
def hpctrain_model(): return [Net]
"""


def test_helpers_of_a_plugin_are_its_own_business(site: Site) -> None:
    site.install("acme-hpc", "schedule.old", "acme_helpers", API + HELPERS)
    registry = build_registry()
    assert not registry.faults, registry.faults
    assert registry.find("schedule", "old") and registry.find("model", "net")
    assert registry.notes() == []


def test_a_method_that_can_t_be_called_as_its_contract_s_is_told(site: Site) -> None:
    site.install(
        "acme-hpc", "schedule.old", "acme_old", plugin("schedule", "Schedule", "def factor(self, step): ...\n")
    )
    with pytest.raises(EnvironmentUnfitError, match=r"`factor` is called with \(step, steps\), and takes \(step\)"):
        build_registry().find("schedule", "old")


def test_a_broken_plugin_gives_its_name_to_one_of_hpctrain_with_a_line(site: Site) -> None:
    """Two plugins of a module are each told by their own name, whatever the entry point is called."""
    both = plugin("logger", "Logger", "def opens(self): ...\n").replace(
        "[Old]", "[Old, type('Csv', (Old,), {'name': 'csv', '__module__': __name__})]"
    )
    site.install("acme-hpc", "logger.both", "acme_both", both)
    registry = build_registry()
    with pytest.raises(EnvironmentUnfitError, match="logger plugin 'old' is broken: acme_both"):
        registry.find("logger", "old")
    assert registry.find("logger", "csv").source.distribution == "hpctrain"
    (line,) = registry.notes()
    assert "it provides the logger 'csv', since acme_both (acme-hpc 1.2, entry point 'logger.both') is broken: " in line
    broken = {(row.slot, row.name) for row in list_plugins(registry) if row.state == "broken"}
    assert broken == {("logger", "old"), ("logger", "csv")}


def test_blocking_and_unknown_names() -> None:
    registry = build_registry(block=["hpctrain_plugins.model.gpt"])
    with pytest.raises(EnvironmentUnfitError, match="blocked"):
        registry.find("model", "gpt")
    with pytest.raises(UsageError, match=r"'adamv'; did you mean 'adam'\? \(installed: adam, adamw, adamw-8bit, sgd\)"):
        registry.find("optimizer", "adamv")


def test_every_first_party_plugin_is_active() -> None:
    registry = build_registry()
    assert not registry.faults and not registry.remarks
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


COMMAND = """
import click
from hpctrain.toolkit.commands import UsageError, hookimpl

@click.command()
@click.option("--wrong", is_flag=True)
def command(wrong):
    "Count to seven."
    if wrong:
        raise UsageError("found a mistake")
    click.echo("counted")
    return 7

@hookimpl
def hpctrain_command():
    return command
"""


@pytest.mark.parametrize("group", ["", "bench", "checkpoint"])
def test_a_plugin_adds_a_command(site: Site, group: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [group, "count"] if group else ["count"]
    site.install("acme-hpc", ".".join(["command", *words]), "acme_count", COMMAND)
    assert execute(words) == 7 and capsys.readouterr().out == "counted\n"
    assert execute([*words, "--wrong"]) == 2 and capsys.readouterr().err == "hpctrain: found a mistake\n"
    assert "acme_count" in sys.modules
    assert execute([*words[:-1], "--help"]) == 0
    assert "\nOf plugins:\n" in (shown := capsys.readouterr().out) and "count" in shown and "Count to seven." in shown
    assert execute(["plugins"]) == 0
    assert re.search(rf"^command +{' '.join(words)} +active +acme-hpc 1\.2 ", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("point", "source", "why"),
    [
        ("command.count", "import no_such_package", "it needs the package 'no_such_package', which is not installed"),
        ("command.count", "1 / 0", "importing it raised ZeroDivisionError"),
        ("command.count", "raise SystemExit(7)", "importing it raised SystemExit: 7"),
        ("command.count", COMMAND.replace("@hookimpl", ""), "it implements no hook hpctrain_command"),
        ("command.count", COMMAND.replace("return command", "return 5"), "expected a click.Command, found 5"),
        (
            "command.count",
            COMMAND.replace("return command", "return 1 / 0"),
            "hook hpctrain_command raised ZeroDivisionError",
        ),
    ],
)
def test_a_broken_command_is_told_where_it_is_used_and_in_the_help(
    site: Site, point: str, source: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No other command notices."""
    site.install("acme-hpc", point, "acme_count", source)
    assert execute(["count"]) == EXIT_ENVIRONMENT
    said = capsys.readouterr().err
    assert said.startswith("hpctrain: the command 'count' is broken: acme_count (acme-hpc 1.2") and why in said
    assert execute(["--help"]) == 0
    assert why in " ".join(capsys.readouterr().out.split())
    assert execute(["plugins"]) == 0 and "  broken  acme-hpc 1.2" in capsys.readouterr().out
    assert execute(["bench", "--help"]) == 0


def test_names_of_commands(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """hpctrain's own stay; two of one name and one without a place are broken, and all of it is told."""
    told = COMMAND.replace("Count to seven.", "Not this one.")
    for name in ("run", "fly.away", "bench.machine"):
        site.install(f"acme-{name}", f"command.{name}", f"acme_{name.replace('.', '_')}", told)
    for name in ("acme-two", "bob-two"):
        site.install(name, "command.two", name.replace("-", "_"), COMMAND)
    own = cli.get_command(click.Context(cli), "run")
    assert own is not None and own.help is not None and own.help.startswith("Train JOB.toml")
    assert execute(["two"]) == EXIT_ENVIRONMENT
    assert (
        "claimed by acme_two (acme-two 1.2, entry point 'command.two') and by bob_two (bob-two"
        in capsys.readouterr().err
    )
    assert execute(["--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Not this one" not in shown and shown.count("the command 'two' is broken") == 2
    assert (
        "the command 'run' is broken: acme_run (acme-run 1.2, entry point 'command.run'): the name is that of a"
        in shown
    )
    assert "the command 'fly away' is broken" in shown and "names no group" in shown
    assert execute(["bench", "--help"]) == 0 and "'bench machine' is broken" in " ".join(
        capsys.readouterr().out.split()
    )
    assert execute(["plugins", "--json"]) == 0
    rows = [
        row for row in json.loads(capsys.readouterr().out) if row["slot"] == "command" and "two" in row["distribution"]
    ]
    assert [row["state"] for row in rows] == ["broken", "broken"]


def test_a_command_is_imported_on_use_only(site: Site) -> None:
    site.install("acme-hpc", "command.count", "acme_count", COMMAND)
    build_registry()
    assert execute(["schema"]) == 0 and "acme_count" not in sys.modules
