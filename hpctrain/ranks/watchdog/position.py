"""The position of the training on this rank. Written by the loop's thread, read by the watchdog's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

BETWEEN = "between phases"
START, FIRST, END = "start", "first samples", "end"
UNLIMITED = (START, "build", FIRST, END)
"""Phases that may take any time, since data and weights can be large. The watchdog only tells of long ones."""
COMPILING = ", compiling"
"""The end of the name of a phase in which this rank or the others may compile."""
LOADER = "loader"
"""The name of a thread that loads samples."""


def is_unlimited(phase: str) -> bool:
    """Whether a phase may take any time."""
    return phase in UNLIMITED or phase.endswith(COMPILING)


class Position:
    """Phase and step, and when they changed last."""

    compiles = False
    """Whether kernels are compiled where a phase is entered for the first time: the first step then has no limit."""

    def __init__(self) -> None:
        self.phase, self.step = START, 0
        """The step is the last completed one."""
        self.thread = threading.get_ident()
        """The thread that trains."""
        self.failure: str | None = None
        """The line at which communication has failed."""
        self.entered: Callable[[str], None] = lambda _: None
        """Is told of each phase that begins."""
        self._moved = time.monotonic()
        self._entered: set[str] = set()

    @property
    def idle(self) -> float:
        """Seconds since the last move."""
        return time.monotonic() - self._moved

    def move(self, phase: str, step: int | None = None) -> None:
        """Something has happened: training is in `phase` now."""
        self._moved = time.monotonic()
        self.phase = phase
        self.entered(phase)
        if step is not None:
            self.step = step

    def touch(self) -> None:
        """Count the time anew: the whole process was suspended."""
        self._moved = time.monotonic()

    def inside(self, phase: str, step: int) -> AbstractContextManager[None]:
        """The context of a phase. An exception leaves the position there."""
        return _Inside(self, phase, step)

    def enter(self, phase: str, step: int) -> None:
        """A phase begins."""
        name = phase
        if phase not in self._entered:
            # a stream may skip what earlier runs have read
            name = FIRST if phase == "data" else f"{phase}{COMPILING}" if self.compiles else phase
        self.move(name, step)

    def leave(self, phase: str, before: str) -> None:
        """The phase is over, which has followed `before`."""
        self._entered.add(phase)
        self.move(before if before in (START, END) else BETWEEN)


class _Inside(AbstractContextManager[None]):
    """A class, not a generator: a step enters some 14 phases, and this takes half the time."""

    def __init__(self, position: Position, phase: str, step: int) -> None:
        self._position, self._phase, self._step = position, phase, step

    def __enter__(self) -> None:
        self._before = self._position.phase
        self._position.enter(self._phase, self._step)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._position.leave(self._phase, self._before)
