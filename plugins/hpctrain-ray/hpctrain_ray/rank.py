"""A rank of `Training`: a Ray actor that is in a loop of `hpctrain.own_loop` while it waits for batches."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hpctrain_tools.launch.channel_directory import ChannelDirectory

from hpctrain.api import TrainingError
from hpctrain.base.launcher_variables import RankNumbers, started_variables
from hpctrain_ray.hook import tell_waiting
from hpctrain_ray.learner import Learner
from hpctrain_ray.private_directories import make_private_directory
from hpctrain_ray.seats import Node, own_node

if TYPE_CHECKING:
    import hpctrain

_TELL = 2.0
"""Seconds between two words to the watchdog while the rank waits."""
_OWN = {"loss"}
"""Numbers of a learner that the step's row has already."""


@dataclass(frozen=True)
class Entry:
    """The way in which a rank enters the loop. tables: of the job. directory: where its relative paths start. host: the address of
    rank 0's node."""

    numbers: RankNumbers
    host: str
    tables: Mapping[str, Any]
    directory: Path
    resume: str


@dataclass(frozen=True)
class Position:
    """The completed steps, or the step that was just trained; the newest checkpoint that is complete, or that was resumed from."""

    step: int
    checkpoint: Path | None


class LearnerRank:
    """A rank. `enter` and what needs the loop are collective.

    An error in the loop ends this process, and those of the other ranks, as it does for any program with such a loop. Only where
    there is one rank, it is raised.
    """

    def __init__(self, make: Callable[[], Learner]) -> None:
        self._make = make
        self._stack = ExitStack()
        self._working = threading.Lock()
        self._channel: ChannelDirectory | None = None
        self._learner: Learner | None = None
        self._steps: Iterator[Any] = iter(())
        self._number: int | None = None
        """The number of the step that is open."""
        self._trained = False
        """Whether it has been trained."""
        threading.Thread(target=self._tell_waiting, daemon=True).start()

    def node(self) -> Node:
        """The node of this actor."""
        return own_node()

    def prepare(self, token: str, rank: int, secret: bytes) -> Path:
        """Make the private directory of the start, which will tell how this process has ended."""
        self._channel = ChannelDirectory(make_private_directory(token, rank, secret))
        return self._channel.directory

    def forget(self) -> None:
        """Remove the private directory: the process will be ended."""
        if self._channel is not None:
            shutil.rmtree(self._channel.directory, ignore_errors=True)

    def enter(self, entry: Entry) -> tuple[Position, int, int]:
        """Enter the loop; the completed steps, and the place among the ranks with different samples, and their number."""
        import hpctrain

        assert self._channel is not None
        with self._in_loop():
            os.chdir(entry.directory)
            told = started_variables(entry.numbers, self._channel.directory, entry.host)
            os.environ.clear()
            os.environ.update(told)
            loop = self._stack.enter_context(hpctrain.own_loop(dict(entry.tables), entry.resume))
            self._learner = self._make()
            self._learner.loop = loop
            self._learner.setup(loop)
            self._steps = iter(loop.steps())
            self._advance()
            return self._position(loop.step), loop.data_rank, loop.data_size

    @contextmanager
    def _in_loop(self) -> Iterator[None]:
        """The loop meets the errors of this context."""
        with self._working:
            try:
                yield
            except BaseException as error:
                self._learner = None
                trace = _behind_own(error.__traceback__)
                self._stack.__exit__(type(error), error.with_traceback(trace), trace)
                raise
            if self._learner is not None:
                tell_waiting()

    @property
    def _loop(self) -> hpctrain.Loop:
        return self._of_learner().loop

    def _of_learner(self) -> Learner:
        if self._learner is None:
            raise TrainingError("the rank is in no loop")
        return self._learner

    def _position(self, step: int) -> Position:
        newest = self._loop.checkpoint
        return Position(step, None if newest is None else newest.absolute())

    def _advance(self) -> None:
        """Begin the next step: the one before is complete then, with its row of metrics and its checkpoint."""
        step = next(self._steps, None)
        self._number, self._trained = None if step is None else step.number, False

    def train(self, batch: Any) -> tuple[Position, dict[str, float]]:
        """Train a step; its number, and what the learner tells."""
        with self._in_loop():
            if self._trained:
                self._advance()
            loop = self._loop
            if self._number is None:
                why = (
                    "a signal has asked it to stop" if loop.stopped else f"it has {loop.step} steps, all of [job] steps"
                )
                raise TrainingError(f"the training has no step left: {why}")
            found = {name: float(value) for name, value in self._of_learner().train(batch).items()}
            loop.log(**{name: value for name, value in found.items() if name not in _OWN})
            self._trained = True
            return self._position(self._number), found

    def evaluate(self, batch: Any) -> tuple[Position, dict[str, float]]:
        """The numbers that the learner measures."""
        with self._in_loop():
            found = {name: float(value) for name, value in self._of_learner().evaluate(batch).items()}
            return self._position(self._trained_steps()), found

    def weights(self, name: str) -> tuple[Position, list[Any]]:
        """A reference to the full weights of a model by name, on the first rank; nothing on the others."""
        import ray

        with self._in_loop():
            model = getattr(self._of_learner(), name, None)
            if model is None:
                raise TrainingError(
                    f"weights: the learner has no {name!r}, expected the attribute of a model of setup's"
                )
            state = self._loop.get_state_dict(model)
            references = [ray.put({key: value.cpu() for key, value in state.items()})] if self._loop.rank == 0 else []
            return self._position(self._trained_steps()), references

    def save(self) -> tuple[Position, None]:
        """Complete the step that was trained, and save it."""
        with self._in_loop():
            if self._trained:
                self._loop.save()
                self._advance()
            return self._position(self._loop.step), None  # which the guard may have taken back

    def _trained_steps(self) -> int:
        return self._number if self._trained and self._number is not None else self._loop.step

    def leave(self) -> None:
        """Complete the step that was trained, save it, and leave the loop."""
        with self._working:
            self._learner = None
            self._stack.close()

    def read_checkpoint(self, checkpoint: Path) -> dict[str, bytes]:
        """The files of a checkpoint by name."""
        files = [one for one in sorted(checkpoint.rglob("*")) if one.is_file()]
        return {str(one.relative_to(checkpoint)): one.read_bytes() for one in files}

    def write_checkpoint(self, directory: Path, files: Mapping[str, bytes]) -> None:
        """Write the files of a checkpoint into a new directory; those of earlier calls, beside it, go."""
        for name, content in files.items():
            path = directory / name
            if directory not in path.parents or ".." in path.parts:
                raise TrainingError(f"found the file {name!r} in a state, expected one within the checkpoint")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        for other in directory.parent.parent.iterdir():
            if other != directory.parent:
                shutil.rmtree(other, ignore_errors=True)

    def _tell_waiting(self) -> None:
        pause = threading.Event()
        while not pause.wait(_TELL):
            if self._working.acquire(blocking=False):
                try:
                    if self._learner is not None:
                        tell_waiting()
                finally:
                    self._working.release()


def _behind_own(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback behind the frames of this package: the program's own; all of it, if there is none."""
    found = trace
    while found is not None and str(found.tb_frame.f_globals.get("__name__")).startswith(f"{__package__}."):
        found = found.tb_next
    return found or trace
