"""A rank of `Training`: a Ray actor that is in a loop of `hpctrain.own_loop` while it waits for batches."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.api import TrainingError
from hpctrain.toolkit.starting import RankNumbers, started_variables
from hpctrain_ray.attendant import Place, own_place, private_directory
from hpctrain_ray.hook import tell_waiting
from hpctrain_ray.learner import Learner

_TELL = 30.0
"""Seconds between two words to the watchdog while the rank waits."""
_OWN = {"loss"}
"""Numbers of a learner that the step's row has already."""


@dataclass(frozen=True)
class Entry:
    """The place and the way in which a rank enters the loop. tables: of the job. directory: where its relative paths start."""

    numbers: RankNumbers
    token: str
    secret: bytes
    host: str
    tables: Mapping[str, Any]
    directory: Path
    resume: str


class LearnerRank:
    """A rank. Its methods are collective, except for `place`, `log_file` and those of files."""

    def __init__(self, make: Callable[[], Learner]) -> None:
        self._make = make
        self._stack = ExitStack()
        self._working = threading.Lock()
        self._learner: Learner | None = None
        self._steps: Iterator[Any] = iter(())
        self._trained = False
        """Whether the step that is open has been trained."""
        self._number = 0
        threading.Thread(target=self._tell_waiting, daemon=True).start()

    def place(self) -> Place:
        """The place of this actor."""
        return own_place()

    def log_file(self) -> str:
        """The file with what this process says on standard error."""
        return os.readlink(f"/proc/self/fd/{sys.__stderr__.fileno()}") if sys.__stderr__ else ""

    def enter(self, entry: Entry) -> int:
        """Enter the loop; the completed steps."""
        import hpctrain

        with self._working:
            os.chdir(entry.directory)
            directory = private_directory(entry.token, entry.numbers.rank, entry.secret)
            told = started_variables(entry.numbers, directory, entry.host)
            os.environ.clear()
            os.environ.update(told)
            try:
                loop = self._stack.enter_context(hpctrain.own_loop(dict(entry.tables), entry.resume))
            finally:
                shutil.rmtree(directory, ignore_errors=True)
            self._learner = self._make()
            self._learner.loop = loop
            self._learner.setup(loop)
            self._steps = iter(loop.steps())
            self._open()
            return self._number - 1

    def _open(self) -> None:
        """Begin the next step: the one before is complete then, with its row of metrics and, where it is due, its checkpoint."""
        step = next(self._steps, None)
        if step is None:
            loop = self._of_learner().loop
            why = "a signal has asked it to stop" if loop.stopped else f"it has {loop.step} steps, all of [job] steps"
            raise TrainingError(f"the training has no step left: {why}", everywhere=True)
        self._number, self._trained = step.number, False

    def _of_learner(self) -> Learner:
        if self._learner is None:
            raise TrainingError("the rank is in no loop", everywhere=True)
        return self._learner

    def train(self, batch: Any) -> tuple[int, dict[str, float]]:
        """Train a step; its number, and what the learner tells."""
        with self._working:
            if self._trained:
                self._open()
            found = {name: float(value) for name, value in self._of_learner().train(batch).items()}
            self._of_learner().loop.log(**{name: value for name, value in found.items() if name not in _OWN})
            self._trained = True
            return self._number, found

    def evaluate(self, batch: Any) -> dict[str, float]:
        """The numbers that the learner measures."""
        with self._working:
            return {name: float(value) for name, value in self._of_learner().evaluate(batch).items()}

    def weights(self, name: str) -> list[Any]:
        """A reference to the full weights of a model by name, on the first rank; nothing on the others."""
        import ray

        with self._working:
            learner = self._of_learner()
            state = learner.loop.get_state_dict(getattr(learner, name))
            return [ray.put({key: value.cpu() for key, value in state.items()})] if learner.loop.rank == 0 else []

    def leave(self) -> None:
        """Complete the step that was trained, save it, and leave the loop."""
        with self._working:
            self._learner, self._trained = None, False
            self._stack.close()

    def newest_checkpoint(self, checkpoints: Path) -> str:
        """The name of the checkpoint of the highest step."""
        newest = max(checkpoints.glob("step-*[0-9]"), default=None, key=lambda path: path.name)
        if newest is None:
            raise TrainingError(f"found no checkpoint in {checkpoints}, expected a step that is trained before a save")
        return newest.name

    def read_checkpoint(self, checkpoints: Path) -> tuple[str, dict[str, bytes]]:
        """The name of the newest checkpoint, and its files."""
        newest = checkpoints / self.newest_checkpoint(checkpoints)
        files = {str(one.relative_to(newest)): one.read_bytes() for one in newest.rglob("*") if one.is_file()}
        return newest.name, files

    def write_checkpoint(self, directory: Path, files: Mapping[str, bytes]) -> None:
        """Write the files of a checkpoint into a new directory."""
        for name, content in files.items():
            path = directory / name
            if directory not in path.parents or ".." in path.parts:
                raise TrainingError(f"found the file {name!r} in a state, expected one within the checkpoint")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def _tell_waiting(self) -> None:
        pause = threading.Event()
        while not pause.wait(_TELL):
            if self._working.acquire(blocking=False):
                try:
                    if self._learner is not None:
                        tell_waiting()
                finally:
                    self._working.release()
