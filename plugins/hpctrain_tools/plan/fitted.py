"""Tells what a search of settings has found: lines, JSON, and a job file."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import tomli_w

from hpctrain.job.raw import RawJob, merge
from hpctrain_tools.plan.fit import Trial
from hpctrain_tools.plan.job_plan import gigabytes

# settings that are refused, of which a table says why
_REFUSED = 3
# seconds
_NOW_AND_THEN = 30.0


class Progress:
    """Tells the best settings so far: on a terminal in a line that renews, else when there are better ones, and now and then."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._renews = stream, stream.isatty()
        self._tried, self._last = 0, time.monotonic()
        self._best: tuple[bool, float] | None = None
        self._line = "none has a plan yet"

    def tell(self, trial: Trial) -> None:
        """Count a trial, which has ended."""
        self._tried += 1
        better = False
        if trial.plan is not None:
            value = trial.fits, -(trial.seconds if trial.fits else trial.lacks)
            better = self._best is None or value > self._best
        if better:
            self._best = value
            self._line = f"{'best so far' if trial.fits else 'nothing fits yet; nearest'}: {told(trial)}"
        text = f"{self._tried} settings tried; {self._line}"
        if self._renews:
            self._stream.write(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}")
        elif better or time.monotonic() - self._last > _NOW_AND_THEN:
            self._stream.write(f"{text}\n")
            self._last = time.monotonic()
        self._stream.flush()

    def end(self) -> None:
        """Leave the line on a terminal."""
        if self._renews and self._tried:
            self._stream.write("\n")


def told(trial: Trial) -> str:
    """The trial in a line."""
    plan = trial.plan
    if plan is None:
        return f"{trial.settings}: refused"
    need = f"{gigabytes(plan.largest.most)} GB"
    if not trial.fits:
        return f"{trial.settings}: {need}, lacks {gigabytes(trial.lacks)} GB"
    return f"{trial.settings}: {need}, {trial.seconds:.3g} s"


def table(trials: Sequence[Trial], fitting: Sequence[Trial], ranks: int) -> Iterator[str]:
    """The settings that fit, the fastest first, each with less memory than those before; and what the others lack."""
    if fitting:
        yield f"{'seconds':>9}{'GB':>9}  settings on {ranks} ranks, the fastest first, then with less memory"
        for one in fitting:
            assert one.plan is not None
            yield f"{one.seconds:>9.3g}{gigabytes(one.plan.largest.most):>9}  {one.settings}"
    lacking = sorted((one for one in trials if one.plan is not None and not one.fits), key=lambda one: one.lacks)
    if lacking:
        yield f"{len(lacking)} settings do not fit:"
        for one in lacking:
            yield f"  lacks {gigabytes(one.lacks)} GB: {one.settings}"
    refused = [one for one in trials if one.plan is None]
    if refused:
        yield f"{len(refused)} settings do not go with the job, such as"
        for one in refused[:_REFUSED]:
            yield f"  {one.settings}: {one.why.splitlines()[0]}"


def as_dict(trials: Sequence[Trial], fitting: Sequence[Trial], advice: Sequence[str]) -> dict[str, Any]:
    """The trials for JSON, in bytes and seconds, those of the list first."""
    rest = [one for one in trials if one not in fitting]
    return {"fitting": [_trial(one) for one in fitting], "others": [_trial(one) for one in rest], "advice": advice}


def fitted_text(trial: Trial, raw: RawJob, job: Path, overrides: Sequence[str], path: Path) -> str:
    """The text of a job file at `path` with the trial's settings: it extends `job`, or is whole where `job` is no file or was
    changed by overrides."""
    tables = trial.settings.tables(raw.tables)
    if overrides or not job.is_file():
        tables = merge(raw.tables, tables)
    else:
        tables = {"extends": os.path.relpath(os.path.realpath(job), os.path.realpath(path.parent)), **tables}
    return f"# hpctrain plan --fit: {told(trial)}\n" + tomli_w.dumps(tables)


def _trial(trial: Trial) -> dict[str, Any]:
    plan = trial.plan
    found: dict[str, Any] = {"settings": trial.settings.tables({}), "fits": trial.fits}
    if plan is None:
        return {**found, "refused": trial.why}
    seconds = None if plan.time is None else plan.time.seconds
    return {**found, "peak_bytes": plan.largest.most, "lacks_bytes": max(0.0, trial.lacks), "step_seconds": seconds}
