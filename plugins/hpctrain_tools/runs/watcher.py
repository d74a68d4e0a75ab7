"""Watches a run: looks at its files again and again, at each no more often than it must."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpctrain_tools.runs.history import History
from hpctrain_tools.runs.log_tail import last_lines
from hpctrain_tools.runs.rows import MOST, Step
from hpctrain_tools.runs.run_directory import JobSeen, RunDirectory
from hpctrain_tools.runs.standing import Standing, standing_of
from hpctrain_tools.submit.record import Submission

_LOG_LINES = 50
# seconds given to the rows in one look; those of a large file come in several
_READING = 0.5
# seconds between two looks at the lock, the job, the log and the checkpoints
_BETWEEN = 2.0


@dataclass(frozen=True)
class Snapshot:
    """A run as a look has found it. wrote: when it last wrote, in seconds since 1970."""

    directory: Path
    job: JobSeen
    standing: Standing
    submission: Submission | None
    history: History
    checkpoint: Path | None
    wrote: float | None
    log: list[str]

    @property
    def seconds_left(self) -> float | None:
        """The time until the last step."""
        step, each = self.history.step, self.history.step_seconds
        last = self.job.last_step(step)
        if step is None or last is None or each is None:
            return None
        left = max(0, last - step.step) * each
        return left if 0 <= left < MOST else None


class Watcher:
    """Reads a run's files for a view."""

    def __init__(self, directory: Path) -> None:
        self._run = RunDirectory(directory)
        self._job = self._run.job()
        self._history = History(self._run.metrics, self._job.keep)
        self._standing = Standing("unknown")
        self._newest: Step | None = None
        self._submission: Submission | None = None
        self._checkpoint: Path | None = None
        self._log: list[str] = []
        self._looked = -_BETWEEN

    def look(self, seconds: float = _READING) -> Snapshot:
        """Read what is new. seconds: given to the rows."""
        begin = time.monotonic()
        due = begin - self._looked >= _BETWEEN
        if due and (job := self._run.job()) != self._job:
            if job.keep != self._job.keep:
                self._history = History(self._run.metrics, job.keep)
            self._job = job
        with suppress(OSError):  # the file system may not answer now; the last rows stay
            self._history.read()
            while self._history.unread and time.monotonic() < begin + seconds:
                self._history.read()
        if due:
            self._looked = begin
            goes_on = self._standing.word == "running" and self._history.step != self._newest
            if not goes_on:  # else nothing is new, and a look at the lock may hold up a run that starts
                self._standing = standing_of(self._run, self._job, self._history.step)
            self._newest = self._history.step
            self._submission, self._checkpoint = self._run.submission(), self._run.checkpoint()
            self._log = last_lines(self._run.log, _LOG_LINES)
        return Snapshot(
            self._run.path,
            self._job,
            self._standing,
            self._submission,
            self._history,
            self._checkpoint,
            self._run.wrote(),
            self._log,
        )
