"""Trains a job to measure it, on the ranks that call this."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from hpctrain.api import HpctrainError, UsageError
from hpctrain.base.safe_files import scratch_directory
from hpctrain.checking.check import check
from hpctrain.job.raw import RawJob
from hpctrain.job.reading import read_job
from hpctrain.training.rank import run
from hpctrain_tools.bench.tables import SCRATCH, measured_tables
from hpctrain_tools.bench.turns import Choose, Turns, TurnsHook


def refuse(raw: RawJob, ranks: int, steps: int) -> None:
    """Raises UsageError for a job that can't be trained on so many ranks, as it is or as it is measured."""
    check(raw, ranks, tries=True)
    with scratch_directory("bench-") as directory:
        tables = measured_tables(raw.tables, steps, str(directory / "run"))
    try:
        check(RawJob(tables, raw.places, raw.source), ranks)
    except HpctrainError as error:
        raise UsageError(
            f"bench trains a job without its evaluations, checkpoints and loggers, and this one can't be so: {error}"
        ) from None


def measure(job: Path, overrides: Sequence[str], ranks: int | None, steps: int, choose: Choose) -> Turns:
    """The job's turns with the trainers that `choose` names. Collective over the ranks of the launcher.

    ranks: how many there should be; None for any.
    """
    raw = read_job(job, overrides)
    check(raw, None)
    turns = Turns(raw, ranks, steps, choose)
    TurnsHook.turns = turns
    # the ranks take that of rank 0
    within = os.environ.get(SCRATCH)
    with scratch_directory("bench-", Path(within) if within else None) as directory:
        try:
            with silent():
                result = run(measured_tables(raw.tables, turns.steps, str(directory / "run")), resume="never")
        finally:
            if turns.directory:
                shutil.rmtree(turns.directory.parent, ignore_errors=True)  # on each node
    if result["exit_code"]:  # a signal
        raise SystemExit(result["exit_code"])
    if not turns.done:
        raise UsageError(
            f"the job ended after step {result['step']}, expected {turns.steps} steps: leave out the hook that ends it, or take "
            "fewer --steps"
        )
    return turns


@contextmanager
def silent() -> Iterator[None]:
    """The screen of a training is not that of a measurement. Errors go to standard error as ever."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield
