"""The kit finds the plugins of tests/faulty, each of which breaks one promise, and nothing in hpctrain's own plugins."""

from __future__ import annotations

import csv
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from faulty import FAULTS, Fault
from hpctrain_tools.testing.check import find_broken_promises
from jobs import TINY

import hpctrain
from hpctrain.api import EnvironmentUnfitError, Plugin, UsageError
from hpctrain.cli import cli
from hpctrain.registry.registry import build_registry
from hpctrain.registry.slots import SLOTS
from hpctrain.testing import BrokenPromiseError, check_plugin

QUICK = ["HiddenMomentum", "NanSchedule", "NoSum", "ListsNoModel"]
"""Faults of the default tier: found in a run, before one, between ranks, and after a resume."""
SLOW = {
    "ByHash", "ChangesBuffersTwice", "FlatResidual", "KnowsNoStranger", "LargestOfItsPieces", "SeedsByRank", "SumsOverAll"
}  # fmt: skip
NIGHTLY = [str(one) for one in FAULTS if one.plugin.__module__ == "faulty.habits" or str(one) in SLOW]
EACH_COMMIT = {
    "activation_checkpointing.full", "checkpoint.hdf5", "communicator.mpi", "compression.powersgd", "dataset.synthetic",
    "hook.ema", "logger.csv", "metric.accuracy", "model.gpt", "optimizer.adamw", "parallelism.pipeline",
    "parallelism.tensor", "pipeline_schedule.1f1b", "precision.fp16", "profile.torch", "scheduler.slurm",
    "sharding.zero-1", "sharding.zero-3",
}  # fmt: skip
"""Plugins of the thorough tier, one of each slot or two."""
UNFIT = {
    "accelerator",
    "nccl",
    "record",
    "fp8",
    "tf32",
    "mixture",
    "tokens",
    "text",
    "stdlib-text",
    "kernels",
    "report",
    "lr-finder",
    "kubernetes",
    "mlflow",
    "opentelemetry",
    "prometheus",
    "tensorboard",
    "wandb",
}
"""Plugins that need an accelerator, files or servers of their own, packages, or another kind of job."""


def own_plugins() -> list[str]:
    """hpctrain's plugins that the kit's job can choose."""
    found = [key for key, one in build_registry(()).entries.items() if one.source.distribution == "hpctrain"]
    return [f"{slot}.{name}" for slot, name in sorted(found) if name not in UNFIT]


def tier(plugin: str) -> object:
    marks = (
        [] if plugin == "schedule.cosine" else [pytest.mark.thorough if plugin in EACH_COMMIT else pytest.mark.nightly]
    )
    return pytest.param(plugin, marks=marks, id=plugin)


@pytest.mark.timeout(300)
@pytest.mark.cases(default=QUICK, nightly=NIGHTLY, rest="thorough")
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_is_found(fault: Fault) -> None:
    """With a sentence that names the plugin, its slot and the promise."""
    found = find_broken_promises(fault.plugin, fault.tables, first=True)
    assert found and (found[0].plugin, found[0].slot) == (fault.plugin.name, fault.plugin.slot)
    assert re.search(fault.told, str(found[0]), re.DOTALL), found[0]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the kit examines it on this machine")
def test_what_a_machine_lacks_is_no_broken_promise() -> None:
    with pytest.raises(EnvironmentUnfitError, match="communicator 'nccl' can't be examined on this machine: "):
        check_plugin("communicator.nccl")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("plugin", [*map(tier, own_plugins())])
def test_hpctrain_s_own_plugins_pass(plugin: str) -> None:
    check_plugin(plugin)


def made(slot: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> type[Plugin]:
    """The plugin of a package that `hpctrain plugins new` has written, on sys.path."""
    name = f"fresh-{slot.replace('_', '-')}"
    words = ["plugins", "new", slot, name, "--to", str(here / slot)]
    assert CliRunner().invoke(cli, words, standalone_mode=False).exception is None
    monkeypatch.syspath_prepend(str(here / slot))
    module = importlib.import_module(f"hpctrain_{name.replace('-', '_')}.plugin")
    (found,) = getattr(module, f"hpctrain_{slot}")()
    assert found.name == name and found.__name__ == "".join(map(str.capitalize, name.split("-")))
    return found


@pytest.mark.timeout(600)
@pytest.mark.cases(default=["schedule"], thorough=["optimizer", "parallelism", "checkpoint"], rest="nightly")
@pytest.mark.parametrize("slot", SLOTS)
def test_a_new_package_passes(slot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_plugin(made(slot, tmp_path, monkeypatch))
    texts = [one.read_text() for one in (tmp_path / slot).rglob("*") if one.is_file() and one.suffix != ".pyc"]
    assert len(texts) == 6 and not [text for text in texts if "{name}" in text or "{cls}" in text]


def test_a_package_is_written_once_and_with_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words, told in (
        (["schedule", "My Schedule"], "found the name 'My Schedule', expected small letters"),
        (["schedules", "mine"], "there is no slot 'schedules'; expected one of model, dataset"),
        (["schedule", "mine", "--to", "."], ". can't be made: File exists"),
    ):
        error = CliRunner().invoke(cli, ["plugins", "new", *words], standalone_mode=False).exception
        assert isinstance(error, UsageError) and told in str(error)
    assert not [*tmp_path.iterdir()]


def test_imports_of_what_is_private_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner.py").write_text(
        "from hpctrain.api import Scheduler, hookimpl\nfrom hpctrain.mpi import Settings\nfrom hpctrain.ranks import signals\n\n\n"
        "class Inner(Scheduler):\n    'One.'\n    name = 'inner'\n"
        "    def render(self, launch): return 'x'\n    def submit(self, script, launch): return []\n"
        "    def state(self, id): raise OSError\n    def cancel(self, id, directory): ...\n\n\n"
        "@hookimpl\ndef hpctrain_scheduler(): return [Inner]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = find_broken_promises(importlib.import_module("inner").Inner)
    assert [(one.promise, one.found) for one in found] == [
        (
            "imports what is public only",
            "inner imports hpctrain.ranks.signals, expected hpctrain.api or hpctrain.toolkit",
        )
    ]


def test_functions_that_every_job_would_call_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an installed package: a module that a job loads is wanted."""
    (tmp_path / "counting.py").write_text(
        "from hpctrain.api import Metric, hookimpl\n\n\nclass Counting(Metric):\n    'One.'\n    name = 'counting'\n"
        "    def start(self): raise ValueError\n\n\n@hookimpl\ndef hpctrain_metric(): return [Counting]\n\n\n"
        "@hookimpl\ndef hpctrain_step_end(): ...\n"
    )
    info = tmp_path / "counting-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: counting\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text('[hpctrain]\n"metric.counting" = counting\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    promise = "costs a job that doesn't choose it nothing"
    found = find_broken_promises("metric.counting")
    assert [one.found for one in found if one.promise == promise] == [
        "counting has the function hpctrain_step_end, which each step of every job calls; expected a method of what a Hook's "
        "start() returns"
    ]


def test_what_is_no_plugin_is_refused() -> None:
    with pytest.raises(UsageError, match="expected a subclass of a slot's contract"):
        check_plugin(dict)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r'expected a class or "slot\.name" with one of model, dataset'):
        check_plugin("cosine")
    with pytest.raises(
        UsageError, match=r"scheduler 'kubernetes' can't be made \(image field required, claim field required\)"
    ):
        check_plugin("scheduler.kubernetes")


def test_an_error_lists_every_finding() -> None:
    (fault,) = (one for one in FAULTS if str(one) == "NanSchedule")
    with pytest.raises(BrokenPromiseError) as told:
        check_plugin(fault.plugin)
    assert len(told.value.findings) > 1
    assert all(str(one) in str(told.value) for one in told.value.findings)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_pytest_tests_the_plugins_of_a_distribution(tmp_path: Path) -> None:
    """`pytest --hpctrain DISTRIBUTION`, a test for each plugin; one that isn't there is told."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", str(tmp_path)]
    done = subprocess.run(
        [*command, "--hpctrain", "hpctrain", "-k", "schedule.constant", "--collect-only"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "hpctrain::schedule.constant" in done.stdout, done.stdout + done.stderr
    done = subprocess.run([*command, "--hpctrain", "acme"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 4 and "--hpctrain acme: found no plugin of that distribution" in done.stderr


def test_a_logger_changes_its_own_copy_of_a_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = {"name": "rows", "steps": 2, "output_dir": str(tmp_path)}
    tables = {**TINY, "job": job, "plugins": {"load": ["faulty.around_steps"]}}
    loggers = ["changes-rows", "csv", "opens-nothing"]
    losses = hpctrain.run({**tables, "logger": [{"name": name} for name in loggers]})["losses"]
    rows = list(csv.DictReader(next(tmp_path.rglob("*.csv")).open()))
    assert [float(row["loss"]) for row in rows] == pytest.approx(losses) and min(losses) > 0
    assert "opens-nothing" in caplog.text and "gets no more rows" in caplog.text
