"""The directory of a run: its job, rows, checkpoints, submissions and times, as typed values.

It may be another person's, and crafted: what cannot be read counts as absent.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli
from pydantic import ValidationError

from hpctrain.base.errors import UsageError
from hpctrain.base.safe_files import CHECKPOINTS, METRICS, RESOLVED, log_of, read_bytes, reading
from hpctrain.checkpoint.directory import CheckpointDirectory, step_of
from hpctrain.contracts.scheduler import JOB_FILE, RECORD
from hpctrain.job.tables import KeepBestTable
from hpctrain_tools.runs.rows import MOST, Evaluation, Step, count_of, is_evaluation, number_of, read_row
from hpctrain_tools.submit.record import Submission, newest

# bytes at the end of metrics.jsonl in which the newest rows are looked for; a row has at most the last number
_TAILS = (2**16, 2**18, 2**20)
# bytes in which the newest evaluation must be
_ENOUGH = 2**18


@dataclass(frozen=True)
class JobSeen:
    """The keys of a run's job that say where it ends, and which evaluation is the best."""

    name: str | None = None
    steps: int | None = None
    epochs: float | None = None
    keep: KeepBestTable | None = None

    def last_step(self, newest: Step | None) -> int | None:
        """The step at which the run ends; of a job of epochs as its newest step lets one expect."""
        if self.steps is not None or newest is None or self.epochs is None or (newest.epoch or 0.0) <= 0:
            return self.steps
        assert newest.epoch is not None
        last = self.epochs * (1 + 1e-9) / newest.epoch * newest.step  # whole global batches only
        return max(newest.step, int(last)) if last < MOST else None

    def is_done(self, newest: Step | None) -> bool:
        """Whether the last step is trained."""
        last = self.last_step(newest)
        return newest is not None and last is not None and 0 < last <= newest.step

    def progress(self, newest: Step | None) -> str:
        """ "step 17 of 40", or "step 17, epoch 1.25 of 2"; "" before the first step."""
        if newest is None:
            return ""
        if self.steps is not None:
            return f"step {newest.step} of {self.steps}"
        known = newest.epoch is not None and self.epochs is not None
        return f"step {newest.step}" + (f", epoch {newest.epoch:.2f} of {self.epochs:g}" if known else "")


@dataclass(frozen=True)
class Newest:
    """The newest rows; None before the first."""

    step: Step | None = None
    evaluation: Evaluation | None = None


class RunDirectory:
    """Reads the files of a run. Nothing is kept between two calls, as the run goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / METRICS
        self.log = log_of(path, 0)

    def is_run(self) -> bool:
        """Whether a run has begun here, or is submitted to."""
        if (self.path / RESOLVED).is_file():
            return True
        submission = self.submission()
        return submission is not None and not submission.runs

    def job(self) -> JobSeen:
        """The job as it ran or was submitted last."""
        tables = self.tables()
        job, checkpoint = (tables.get(name) for name in ("job", "checkpoint"))
        if not isinstance(job, dict):
            return JobSeen()
        name, keep = job.get("name"), checkpoint.get("keep_best") if isinstance(checkpoint, dict) else None
        try:
            best = KeepBestTable.model_validate(keep) if isinstance(keep, dict) else None
        except ValidationError:
            best = None
        epochs = number_of(job.get("epochs"))
        return JobSeen(name if isinstance(name, str) else None, count_of(job.get("steps")), epochs, best)

    def tables(self) -> dict[str, Any]:
        """The tables of the job as it ran or was submitted last, unchecked; none if they can't be read."""
        with suppress(OSError, ValueError, RecursionError):
            path = max((self.path / name for name in (RESOLVED, JOB_FILE)), key=lambda path: _changed(path) or 0.0)
            return tomli.loads(read_bytes(path).decode())  # without the checks of a job file, which cost as much again
        return {}

    def newest_rows(self) -> Newest:
        """Read from the end of the rows: at most a MiB."""
        found = Newest()
        with suppress(OSError), reading(self.metrics) as fd, open(fd, "rb", closefd=False) as file:
            size = file.seek(0, 2)
            for tail in _TAILS:
                file.seek(max(0, size - tail))
                found = _newest_of(file.read(tail).split(b"\n"))
                if size <= tail or (found.step is not None and (found.evaluation is not None or tail >= _ENOUGH)):
                    break
        return found

    def checkpoint(self) -> Path | None:
        """The newest checkpoint: the first that a resume tries."""
        with suppress(OSError):
            return next(iter(CheckpointDirectory(self.path / CHECKPOINTS).candidates()), None)
        return None

    def checkpoints(self) -> list[tuple[int, float]]:
        """The steps of the checkpoints with the times of their saves, in seconds since 1970, in order."""
        with suppress(OSError):
            found = CheckpointDirectory(self.path / CHECKPOINTS).candidates()
            return sorted((step_of(path), time) for path in found if (time := _changed(path)) is not None)
        return []

    def submission(self) -> Submission | None:
        """The newest submission."""
        with suppress(UsageError):
            return newest(self.path)
        return None

    def wrote(self) -> float | None:
        """The time, in seconds since 1970, at which the run last wrote, by the file system's clock."""
        return _newest_change(self.metrics, self.log, self.path / RESOLVED)

    def submitted(self) -> float | None:
        """The time at which the run was last submitted."""
        return _changed(self.path / RECORD)


def _newest_of(lines: list[bytes]) -> Newest:
    step: Step | None = None
    evaluation: Evaluation | None = None
    for line in reversed(lines):
        if b'"step"' not in line or (step is not None and not is_evaluation(line)):
            continue
        row = read_row(line)
        if isinstance(row, Step):
            step = step or row
        elif row is not None:
            evaluation = evaluation or row
        if step is not None and evaluation is not None:
            break
    return Newest(step, evaluation)


def _changed(path: Path) -> float | None:
    try:
        return path.lstat().st_mtime
    except OSError:
        return None


def _newest_change(*paths: Path) -> float | None:
    found = [time for path in paths if (time := _changed(path)) is not None]
    return max(found, default=None)
