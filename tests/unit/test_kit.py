"""The kit finds the plugins of tests/faulty, each of which breaks one promise, and nothing in hpctrain's own plugins."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
from faulty import FAULTS, Fault
from hpctrain_tools.testing.check import find_broken_promises
from jobs import TINY

import hpctrain
from hpctrain.base.errors import UsageError
from hpctrain.plugins.registry import build_registry
from hpctrain.testing import BrokenPromiseError, check_plugin

QUICK = {"MeanLoss", "HiddenMomentum", "NanSchedule", "NoSum", "ListsNoModel", "MeanCompression"}
"""Faults of the default tier: found in a run, before one, between ranks, after a resume, and by a difference."""
CONSTANT = {"model": ("gpt",), "dataset": ("synthetic",), "schedule": ("constant",)}
"""Plugins of the default tier."""
UNFIT = {
    "accelerator",
    "nccl",
    "record",
    "fp8",
    "mixture",
    "tokens",
    "text",
    "stdlib-text",
    "kernels",
    "report",
    "lr-finder",
}
"""Plugins that need an accelerator, files of their own or another kind of job."""


def own_plugins() -> list[str]:
    """hpctrain's plugins that the kit's job can choose."""
    found = [key for key, one in build_registry(()).entries.items() if one.source.distribution == "hpctrain"]
    return [
        f"{slot}.{name}" for slot, name in sorted(found) if name not in UNFIT and slot not in ("logger", "scheduler")
    ]


def tier(name: str, quick: bool) -> object:
    return pytest.param(name, marks=() if quick else pytest.mark.thorough, id=str(name))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", [tier(one, str(one) in QUICK) for one in FAULTS])
def test_a_planted_fault_is_found(fault: Fault) -> None:
    """With a sentence that names the plugin, its slot and the promise."""
    found = find_broken_promises(fault.plugin, fault.tables, first=True)
    assert found and (found[0].plugin, found[0].slot) == (fault.plugin.name, fault.plugin.slot)
    assert re.search(fault.told, str(found[0]), re.DOTALL), found[0]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("plugin", [tier(one, one == "schedule.cosine") for one in own_plugins()])
def test_hpctrain_s_own_plugins_pass(plugin: str) -> None:
    check_plugin(plugin)


def test_what_is_no_plugin_is_refused() -> None:
    with pytest.raises(UsageError, match="expected a subclass of a slot's contract"):
        check_plugin(dict)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r'expected a class or "slot\.name" with one of model, dataset'):
        check_plugin("cosine")


def test_an_error_lists_every_finding() -> None:
    (fault,) = (one for one in FAULTS if str(one) == "NanSchedule")
    with pytest.raises(BrokenPromiseError) as told:
        check_plugin(fault.plugin)
    assert len(told.value.findings) > 1
    assert all(str(one) in str(told.value) for one in told.value.findings)


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
