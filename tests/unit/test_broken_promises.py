"""Plugins that break a promise of their contract: tests/faulty plants them. Those that take two ranks are in tests/ranks."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from conftest import TINY, JobFile
from faulty import FAULTS, SCHEDULERS, Fault

import hpctrain
from hpctrain.base.errors import EXIT_ENVIRONMENT, EXIT_TRAINING, ContractError, HpctrainError
from hpctrain.cli import cli


@pytest.mark.cases(thorough=["ForgottenScale", "ReadsZeros", "LosesAValue", "RecognizesNothing", "ListsNoModel"])
@pytest.mark.parametrize("fault", [one for one in FAULTS if one.ranks == 1], ids=str)
def test_a_broken_promise_is_told(fault: Fault, tmp_path: Path) -> None:
    """Each of these would train on in silence, with other numbers or into a checkpoint that nobody can read."""
    job = {"name": "faulty", "steps": 4, "output_dir": str(tmp_path / "out")}
    with torch.enable_grad(), pytest.raises(HpctrainError, match=fault.told) as told:
        hpctrain.run(fault.tables_over({**TINY, "job": job}))
    assert told.value.exit_code in (EXIT_ENVIRONMENT, EXIT_TRAINING)


def test_a_logger_changes_its_own_copy_of_a_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tables = {**TINY, "job": {"name": "rows", "steps": 2, "output_dir": str(tmp_path)}, "plugins": {"load": ["faulty"]}}
    loggers = ["changes-rows", "csv", "opens-nothing"]
    losses = hpctrain.run({**tables, "logger": [{"name": name} for name in loggers]})["losses"]
    rows = list(csv.DictReader(next(tmp_path.rglob("*.csv")).open()))
    assert [float(row["loss"]) for row in rows] == pytest.approx(losses) and min(losses) > 0
    assert "opens-nothing" in caplog.text and "gets no more rows" in caplog.text


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_scheduler_that_breaks_a_promise_is_told(
    scheduler: Any, job: JobFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(job.directory)
    job.set(plugins={"load": ["faulty"]}, scheduler={scheduler.name: {"nodes": 1, "ranks_per_node": 1}})
    done = CliRunner().invoke(cli, ["submit", str(job.path), "--to", scheduler.name])
    if done.exit_code == 0:
        done = CliRunner().invoke(cli, ["status", str(job.output), "--load", "faulty"])
    assert isinstance(done.exception, ContractError) and re.search(scheduler.told, str(done.exception)), done
