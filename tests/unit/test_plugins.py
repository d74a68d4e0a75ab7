"""Discovery: real distributions on sys.path, working and not."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import plugin_api
import pytest

from hpctrain.api import CompressionOptions
from hpctrain.base.errors import EXIT_ENVIRONMENT, EnvironmentUnfitError, UsageError
from hpctrain.cli import cli, execute
from hpctrain.contracts.scheduler import JOB_FILE
from hpctrain.plugins.changes import API_VERSION, CHANGES
from hpctrain.plugins.listing import describe_options, list_plugins
from hpctrain.plugins.registry import Registry, build_registry
from hpctrain.plugins.user_code.reference import resolve
from hpctrain.starting.scheduler.asking import Submitted
from hpctrain.starting.scheduler.record import Submission

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
    assert "acme-hpc 1.2" in str(
        error.value
    ) and 'expected one: choose it with [plugins] prefer = ["bob_theirs"]' in str(error.value)
    assert registry.find("optimizer", "adamw") and not registry.told()
    assert [row.state for row in list_plugins(registry) if row.name == "theirs"] == ["broken", "broken"]
    for chosen in (build_registry(block=["acme-hpc"]), build_registry(prefer=["bob-hpc"])):
        assert chosen.find("model", "theirs").source.distribution == "bob-hpc"
    assert chosen.told() == [
        "plugin bob_theirs (bob-hpc 1.2, entry point 'model.theirs'): it provides the model 'theirs', and acme_theirs (acme-hpc "
        "1.2, entry point 'model.theirs') is not used; [plugins] prefer says so"
    ]


@pytest.mark.parametrize(
    ("plugins", "said"),
    [
        ("prefer = ['bob-hpc']", "says bob-hpc"),
        ("prefer = ['acme-hpc']", "says acme-hpc"),
        ("block = ['acme-hpc']", "says bob-hpc"),
        ("prefer = 5", "claimed by"),
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
    helper = "def build(self): ...\n    def problem(self): ..."
    site.install("acme-hpc", "model.gpt", "acme_gpt", MODEL.format(name="gpt").replace("def build(self): ...", helper))
    registry = build_registry()
    assert registry.find("model", "gpt").source.distribution == "acme-hpc"
    close, line = registry.told()
    assert close.endswith("did you mean Plugin.problems?")
    assert (
        "hpctrain_plugins.model.gpt (hpctrain" in line
        and 'is not used; [plugins] prefer = ["hpctrain"] takes the other' in line
    )
    assert [row.why.endswith("takes the other") for row in list_plugins(registry) if row.name == "gpt"] == [True]
    ours = build_registry(prefer=["hpctrain"])
    assert ours.find("model", "gpt").source.distribution == "hpctrain" and len(ours.told()) == 1
    assert not build_registry(block=["acme-hpc"]).told()


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("1/0", "importing it raised ZeroDivisionError"),
        ("raise SystemExit(0)", "importing it raised SystemExit"),
        ("raise GeneratorExit", "importing it raised GeneratorExit"),
        ("raise KeyboardInterrupt", "importing it raised KeyboardInterrupt"),
        ("import no_such_package", "it needs the package 'no_such_package'"),
        ("x = 1", "it implements no hook"),
        (
            "HPCTRAIN_API = 99\n" + MODEL.format(name="m"),
            f"asks for plugin API version 99, and this hpctrain has version {API_VERSION}: install a newer hpctrain",
        ),
        ("HPCTRAIN_API = '2'\n" + MODEL.format(name="m"), "asks for plugin API version '2'"),
        (MODEL.format(name="m").replace("def hpctrain_model", "def hpctrain_modell"), "did you mean 'hpctrain_model'?"),
        (MODEL.format(name="m").replace("def build", "def builds"), "Mine (m) lacks build (it has builds)"),
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


def plugin(slot: str, bases: str, body: str, before: str = "") -> str:
    """A module with one class, which has the methods of an earlier version."""
    body = "".join(f"    {line}\n" for line in body.splitlines())
    return f"{API}{before}\nclass Old({bases}):\n    name = 'old'\n{body}\n@hookimpl\ndef hpctrain_{slot}():\n    return [Old]\n"


SPEC = "".join(
    f"def {method}: ...\n"
    for method in ("build(self)", "forward(self, module, batch)", "count(self, batch)", "loss(self, a, b)")
)
BACKEND = "def backend(self): ...\ndef device(self, identity): ...\n"
NO_LONGER = f"plugin API version {API_VERSION} does not call"
OLD: dict[str, tuple[str, str]] = {
    "a model on the meta device": (
        plugin("model", "ModelSpec", SPEC + "meta = True\ndef initialize(self, name, tensor, rows, seed): ...\n"),
        f"{NO_LONGER} `meta`, `initialize`: a model that is built on the meta device derives from `MetaModel`",
    ),
    "a model of a pipeline": (
        plugin(
            "model", "ModelSpec", SPEC + "def embed(self, module, batch): ...\ndef head(self, module, hidden): ...\n"
        ),
        f"{NO_LONGER} `embed`, `head`: a model with all three derives from `PipelineModel`",
    ),
    "a communicator that is asked whether it can": (
        plugin("communicator", "Communicator", BACKEND + "def unavailable(self, identity): return 'no network'\n"),
        f"{NO_LONGER} `unavailable`: `missing(machine)` says what the machine lacks",
    ),
    "the same, called by a method of its own": (
        plugin(
            "communicator",
            "Communicator",
            BACKEND + "def unavailable(self, identity): ...\ndef choose(self, identity, installed):\n"
            "    return next(one for one in installed if one.unavailable(identity) is None)\n",
        ),
        f"{NO_LONGER} `unavailable`",
    ),
    "a checkpointing that refuses": (
        plugin(
            "activation_checkpointing",
            "ActivationCheckpointing",
            "def apply(self, module, spec, replicas): ...\ndef refuse(self, spec, splits_backward): return 'never'\n",
        ),
        f"{NO_LONGER} `refuse`: `problems(plan)` returns a list of `Problem`",
    ),
    "a checkpointing without replicas": (
        plugin("activation_checkpointing", "ActivationCheckpointing", "def apply(self, module, spec): ...\n"),
        "`apply` is called with (module, spec, replicas), and takes (module, spec) (it takes `replicas` as its third argument)",
    ),
    "a precision with a scale": (
        plugin(
            "precision",
            "Precision",
            "parameter_dtype = None\ndef forward(self, device): ...\ndef scale(self, loss): ...\ndef state(self): ...\n",
        ),
        f"{NO_LONGER} `scale`, `state`: `start()` returns a `LossScaler`",
    ),
    "an axis with its traits as attributes": (
        plugin("parallelism", "Parallelism", "axis = 'rows'\norder = 50\ndef apply(self, module, spec, mesh): ...\n"),
        f"lacks traits; Old (old): {NO_LONGER} `axis`, `order`: the property `traits` returns them as an `AxisTraits`",
    ),
    "an axis that cuts batches": (
        plugin(
            "parallelism",
            "Parallelism",
            "traits = None\ndef apply(self, module, spec, mesh): ...\ndef split_batch(self, batch): ...\n",
        ),
        f"{NO_LONGER} `split_batch`: the `AppliedAxis` that `apply` returns has it",
    ),
    "an axis whose traits are no property": (
        plugin("parallelism", "Parallelism", "def traits(self): ...\ndef apply(self, module, spec, mesh): ...\n"),
        "`traits` must be a property or a value, found a method",
    ),
    "a strategy that runs": (
        plugin("sharding", "Sharding", "def axes(self, ranks, replicate): ...\ndef synchronize(self): ...\n"),
        f"lacks shard; Old (old): {NO_LONGER} `synchronize`: `shard(module, spec, mesh, sums)` returns a `ShardedModel`",
    ),
    "a strategy whose trait is a method": (
        plugin(
            "sharding",
            "Sharding",
            "def axes(self, ranks, replicate): ...\ndef shard(self, module, spec, mesh, sums): ...\ndef tells_spans(self): ...\n",
        ),
        "`tells_spans` must be a value, found a method",
    ),
    "a format that writes": (
        plugin("checkpoint", "CheckpointFormat", "def snapshot(self, state): ...\n"),
        f"{NO_LONGER} `snapshot`: `writer()` returns a `CheckpointWriter`",
    ),
    "a logger that logs": (
        plugin("logger", "Logger", "def open(self, output_dir, resumed_step): ...\ndef log(self, row): ...\n"),
        f"{NO_LONGER} `log`: the `LogWriter` that `open` returns has it",
    ),
    "a logger of a stated version": (
        "HPCTRAIN_API = 1\n" + plugin("logger", "Logger", "def open(self, output_dir, resumed_step): ...\n"),
        "`open` has changed in plugin API version 2: it returns a `LogWriter`",
    ),
    "a method that takes an argument by name only": (
        plugin("schedule", "Schedule", "def factor(self, step: int, *, steps: int) -> float: ...\n"),
        "`factor` is called with (step, steps), and takes (step, *, steps)",
    ),
    "a hook without its mark": (
        plugin("schedule", "Schedule", "def factor(self, step, steps): ...\n", "def hpctrain_step_end(step): ...\n"),
        "it has the function 'hpctrain_step_end' without the mark of hpctrain.api.hookimpl, so nobody calls it",
    ),
    "a misspelt hook without its mark": (
        plugin("schedule", "Schedule", "def factor(self, step, steps): ...\n", "def hpctrain_step_ende(step): ...\n"),
        "it has the function 'hpctrain_step_ende', which is no hook; did you mean 'hpctrain_step_end', marked with hookimpl?",
    ),
}


@pytest.mark.parametrize("kind", OLD)
def test_an_old_plugin_is_refused_with_what_to_write_instead(site: Site, kind: str) -> None:
    source, sentence = OLD[kind]
    slot = source.rpartition("def hpctrain_")[2].partition("(")[0]
    site.install("acme-hpc", f"{slot}.old", "acme_old", source)
    registry = build_registry()
    assert sentence in fault(registry, f"{slot}.old")
    with pytest.raises(EnvironmentUnfitError, match=r"acme_old \(acme-hpc 1\.2"):
        registry.find(slot, "old")


HELPERS = """
import functools
import logging
from torch import nn

HPCTRAIN_API = 2

class Lines(Logger):
    name = "lines"
    def open(self, output_dir, resumed_step): return Writer(self)
    def log(self, row): "Called by a function of the same name."
    def close(self): ...

class Writer(LogWriter, logging.Handler):
    def __init__(self, owner): self.owner = owner
    def log(self, row): self.owner.log(row)
    def close(self): self.owner.close()
    def emit(self, record, other): "The logging module's own business."

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

class Sum(Compressor):
    def all_reduce(self, gradients, scale): self.settle(gradients)
    def settle(self, gradients): "Its own: another contract's name with other parameters."
    def residuals(self): ...

class Row(Schedule):
    name = "row"
    @given
    def factor(self, step, steps, more): return self.factors(step) + self.missin
    def factors(self, step): "Close to a name that the class has."
    def problem(self): "Close to a name, and used."
    missin = property(problem)
    def figures(self): "A name of another contract."
    def _problems(self): ...

def hpctrain_version(): "Close to no hook."

def __dir__(): return [*globals(), "hpctrain_metric"]
def __getattr__(name):
    "Makes it when asked, as lazy_loader does."
    if name != "hpctrain_metric": raise AttributeError(name)
    return hookimpl(specname=name)(lambda: [])
"""


def test_helpers_of_a_plugin_are_its_own_business(site: Site) -> None:
    """Unless they resemble a name that would do something: a line says so where the job uses the plugin."""
    source = plugin(
        "compression", "LossyCompression", "def compressor(self, bucket, group): return Sum(bucket, group)", HELPERS
    )
    for slot, name in (("schedule", "Row"), ("logger", "Lines"), ("model", "Net")):
        source += f"\n@hookimpl\ndef hpctrain_{slot}():\n    return [{name}]\n"
    site.install("acme-hpc", "compression.old", "acme_helpers", source)
    body = "parameter_dtype = None\ndef forward(self, device): ...\ndef scale(self, amount): ...\n"
    body += "def start(self):\n    from acme_scaled._impl import scaler\n    return scaler(self)\n"
    impl = "def scaler(precision): precision.scale(2)\n"
    site.install("acme-scaled", "precision.old", "acme_scaled", plugin("precision", "Precision", body), _impl=impl)
    registry = build_registry()
    assert not registry.faults, registry.faults
    for slot, name in (("compression", "old"), ("schedule", "row"), ("logger", "lines"), ("model", "net")):
        assert registry.find(slot, name)
    registry.refuse_unfit_parts()
    assert registry.told() == []
    made = registry.find("precision", "old").cls
    (line,) = registry.told()
    assert "Old has 'scale', which plugin API version 2 does not call: `start()` returns a `LossScaler`" in line
    registry.make(made, made.Options()).start()
    assert not build_registry().remarks, "the module that calls it is loaded"


def test_an_old_plugin_gives_its_name_to_one_of_hpctrain_with_a_line(site: Site) -> None:
    """Of two in a module, each is told by its own name, whatever the entry point is called."""
    both = plugin(
        "logger", "Logger", "def open(self, output_dir, resumed_step): ...\ndef log(self, row): ...\n", ""
    ).replace("[Old]", "[Old, type('Csv', (Old,), {'name': 'csv', '__module__': __name__})]")
    site.install("acme-hpc", "logger.both", "acme_both", both)
    registry = build_registry()
    with pytest.raises(EnvironmentUnfitError, match="logger plugin 'old' is broken: acme_both"):
        registry.find("logger", "old")
    assert registry.find("logger", "csv").source.distribution == "hpctrain"
    (line,) = registry.told()
    assert "it provides the logger 'csv', since acme_both (acme-hpc 1.2, entry point 'logger.both') is broken: " in line
    assert not build_registry(prefer=["hpctrain"]).remarks
    broken = {(row.slot, row.name) for row in list_plugins(registry) if row.state == "broken"}
    assert broken == {("logger", "old"), ("logger", "csv")}


def test_what_resembles_a_method_is_told_where_the_plugin_is_used(site: Site) -> None:
    body = SPEC + "def problem(self, plan): ...\ndef flop(self, batch): ...\ndef targets(self, batch): ...\n"
    site.install("acme-hpc", "model.old", "acme_close", plugin("model", "ModelSpec", body))
    registry = build_registry()
    assert registry.told() == []
    registry.find("model", "old")
    assert [line.partition("'model.old'): ")[2] for line in registry.told()] == [
        "Old has 'problem', which nobody calls; did you mean Plugin.problems?",
        "Old has 'flop', which nobody calls; did you mean ModelSpec.flops?",
        "Old has 'targets', which nobody calls; did you mean ModelSpec.target?",
    ]


def test_what_a_plugin_makes_is_compared_before_the_first_step(site: Site) -> None:
    """Its class may be imported late, and is of no concern to the other plugins of the module."""
    source = plugin(
        "compression",
        "LossyCompression",
        "def compressor(self, bucket, group):\n    from acme_late.sums import Sum\n    return Sum(bucket, group)\n",
    )
    source += "\nclass Row(Schedule):\n    name = 'row'\n    def factor(self, step, steps): ...\n"
    source += "\n@hookimpl\ndef hpctrain_schedule():\n    return [Row]\n"
    sums = f"{API}class Sum(Compressor):\n    def all_reduce(self, gradients, scale): ...\n    def settle(self): ...\n"
    site.install("acme-late", "compression.late", "acme_late", source, sums=sums)
    registry, other = build_registry(), build_registry()
    assert other.find("schedule", "row")
    made = registry.make(registry.find("compression", "old").cls, CompressionOptions())
    registry.refuse_unfit_parts()
    made.compressor(None, None)
    other.refuse_unfit_parts()
    with pytest.raises(
        EnvironmentUnfitError, match=r"acme-late 1\.2, .*: acme_late\.sums\.Sum: .*`settle`: it is `consolidate"
    ):
        registry.refuse_unfit_parts()


def test_the_interface_is_that_of_its_version() -> None:
    """Who changes it raises the version and says what changed: no plugin may find out by training something else."""
    version, lines = plugin_api.recorded()
    changes = plugin_api.difference(lines, plugin_api.describe())
    assert not changes, "the interface has changed: run python tests/plugin_api.py"
    assert version == API_VERSION, "the version was raised: run python tests/plugin_api.py"
    page = plugin_api.PAGE.read_text()
    for number in range(2, API_VERSION + 1):
        assert f"\n## Version {number}\n" in page, "the page says what changed in each version"
    for change in CHANGES:
        section = page.partition(f"\n## Version {change.version}\n")[2].partition("\n## ")[0]
        rows = [line for line in section.splitlines() if line.startswith(f"| `{change.contract}` |")]
        assert any(f"`{change.member}`" in row and change.instead in row for row in rows), change
    known = {line.partition("hpctrain.api.")[2].partition(".")[0] for line in lines}
    assert {change.contract for change in CHANGES} <= known


def test_a_changed_interface_is_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A method that another one replaced, an argument more, a hook less: each is a line that came or went."""
    _, lines = plugin_api.recorded()
    old = [line.replace("Sharding.home(self, device", "Sharding.house(self, device") for line in lines]
    old = [line for line in old if not line.startswith("hook hpctrain_outputs")]
    monkeypatch.setattr(plugin_api, "RECORD", tmp_path / "record")
    plugin_api.RECORD.write_text("\n".join([f"plugin API version {API_VERSION}", *old]))
    assert plugin_api.main() == 1
    said = capsys.readouterr().out
    assert "-hpctrain.api.Sharding.house(self" in said and "+hpctrain.api.Sharding.home(self" in said
    assert "+hook hpctrain_outputs(batch: Batch)" in said and "raise API_VERSION" in said
    plugin_api.RECORD.write_text("\n".join([f"plugin API version {API_VERSION - 1}", *old]))
    assert plugin_api.main() == 0 and plugin_api.recorded() == (API_VERSION, lines)


@pytest.fixture
def _heeding() -> Iterator[None]:
    """A background job of a shell ignores SIGINT, and Python with it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_heeding")
def test_a_signal_ends_an_import_that_survives_what_its_module_raises(site: Site) -> None:
    (site.path / "interrupted.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    (site.path / "interrupts.py").write_text("raise KeyboardInterrupt\n")
    for use in (lambda module: build_registry([module]), lambda module: resolve(f"{module}:Net")):
        with pytest.raises((UsageError, EnvironmentUnfitError), match="KeyboardInterrupt"):
            use("interrupts")
        with pytest.raises(KeyboardInterrupt):
            use("interrupted")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_blocking_and_unknown_names() -> None:
    registry = build_registry(block=["hpctrain_plugins.model.gpt"])
    with pytest.raises(EnvironmentUnfitError, match="blocked"):
        registry.find("model", "gpt")
    with pytest.raises(UsageError, match=r"'adamv'; did you mean 'adam'\? \(installed: adam, adamw, adamw-8bit, sgd\)"):
        registry.find("optimizer", "adamv")


def test_every_first_party_plugin_is_active() -> None:
    registry = build_registry()
    assert not registry.faults and not registry.conflicts and not registry.remarks
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
        ("command.count", "HPCTRAIN_API = 999", "it asks for plugin API version 999"),
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
    for name in ("run", "fly.away", "bench.collectives"):
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
    assert execute(["bench", "--help"]) == 0 and "'bench collectives' is broken" in " ".join(
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
