"""Finds the runs below a directory, and tells of each where it is: `hpctrain runs`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpctrain.base.safe_files import CHECKPOINTS, LOGS, RESOLVED
from hpctrain.contracts.scheduler import JOB_FILE, RECORD, JobState
from hpctrain_tools.runs.rows import Evaluation, Step
from hpctrain_tools.runs.run_directory import JobSeen, RunDirectory
from hpctrain_tools.runs.standing import Standing, standing_of
from hpctrain_tools.submit.asking import Submitted, ask_about
from hpctrain_tools.submit.record import Submission

# levels below the directory
_DEEPEST = 6
# directories that are looked into
_MOST = 20_000
_CLOSED = {CHECKPOINTS, LOGS}
# names of which a run has at least one
_FILES = {RESOLVED, JOB_FILE, RECORD}
# threads: over a network a reader mostly waits
_READERS = 8
# given to schedulers that tell of one job at a time
_ASKING_SECONDS = 10.0


@dataclass(frozen=True)
class RunSeen:
    """A run as it is now. time: at which it last wrote, or was submitted."""

    directory: Path
    job: JobSeen
    standing: Standing
    time: float | None
    step: Step | None
    evaluation: Evaluation | None
    checkpoint: Path | None
    submission: Submission | None

    def as_json(self) -> dict[str, Any]:
        """The run for `--json`."""
        step, submission = self.step, self.submission
        return {
            "directory": str(self.directory),
            "name": self.job.name,
            "state": self.standing.word,
            "detail": self.standing.detail,
            "step": step and step.step,
            "steps": self.job.last_step(step),
            "epoch": step and step.epoch,
            "epochs": self.job.epochs,
            "loss": step and step.loss,
            "evaluation": self.evaluation and {"step": self.evaluation.step, **self.evaluation.measured},
            "time": self.time,
            "job": submission and {"scheduler": submission.target, "id": submission.id},
            "checkpoint": self.checkpoint and str(self.checkpoint),
        }


@dataclass(frozen=True)
class Listing:
    """Runs, the newest first. remarks: what could not be found out, in sentences."""

    runs: list[RunSeen]
    remarks: list[str]


def list_runs(root: Path, load: Sequence[str]) -> Listing:
    """Look for runs in `root` and below, and ask the schedulers about those that their files do not show running or done."""
    finder = _Finder()
    with ThreadPoolExecutor(_READERS) as readers:
        runs = [one for one in readers.map(_seen, finder.below(root)) if one is not None]
    runs.sort(key=lambda one: (-(one.time or 0.0), str(one.directory)))
    asked = {
        one.directory: Submitted(one.directory, one.submission, tuple(load))
        for one in runs
        if one.submission is not None and (one.standing.word not in ("running", "done") or one.standing.is_guess)
    }
    answers = ask_about(list(asked.values()), _ASKING_SECONDS)
    told = [
        replace(one, standing=_settled(one.standing, answers.states.get(one.directory)))
        if one.directory in asked
        else one
        for one in runs
    ]
    remarks = answers.complaints
    if finder.is_cut:
        remarks = [
            *remarks,
            f"{root} has more than {_MOST:,} directories, of which these are the first: name one of them",
        ]
    return Listing(told, remarks)


def _seen(directory: Path) -> RunSeen | None:
    run = RunDirectory(directory)
    submission = run.submission()
    if not (directory / RESOLVED).is_file() and (submission is None or submission.runs):
        return None  # the directory above the runs of an array, for instance
    job, newest, wrote = run.job(), run.newest_rows(), run.wrote()
    times = [time for time in (wrote, run.submitted()) if time is not None]
    standing = standing_of(run, job, newest.step)
    own = submission if submission is not None and submission.id else None
    return RunSeen(
        directory, job, standing, max(times, default=None), newest.step, newest.evaluation, run.checkpoint(), own
    )


def _settled(by_files: Standing, state: JobState | None) -> Standing:
    """The state of a submitted run that its files don't show running or done. state: the scheduler's, None if it was not asked."""
    if state is not None and state.word != "unknown":
        return Standing(state.word, state.detail)
    if by_files.word != "pending":
        return by_files
    return Standing("unknown", "its scheduler has not told" if state is None else "its scheduler has forgotten the job")


class _Finder:
    """Looks for directories with files of a run. Follows no links, and goes into no checkpoints."""

    def __init__(self) -> None:
        self.is_cut = False
        self._left = _MOST

    def below(self, root: Path) -> Iterator[Path]:
        """The directories, in no order."""
        waiting = [(root, 0)]
        while waiting:
            path, depth = waiting.pop()
            if self._left == 0:
                self.is_cut = True
                return
            self._left -= 1
            inner, is_run = _look_into(path)
            if is_run:
                yield path
            # runs of an array may be in the directory of an earlier run, but loggers have trees of their own there
            if depth < _DEEPEST:
                waiting += [(path / name, _DEEPEST if is_run else depth + 1) for name in inner]


def _look_into(path: Path) -> tuple[list[str], bool]:
    """The directories in `path`, and whether it has a file of a run."""
    inner, is_run = [], False
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name in _FILES:
                    is_run = True
                elif (
                    entry.name not in _CLOSED and not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
                ):
                    inner.append(entry.name)
    except OSError:
        return [], False  # another person's, or gone
    return inner, is_run
