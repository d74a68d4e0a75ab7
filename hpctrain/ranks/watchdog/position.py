"""The position of the training on this rank. Written by the loop's thread, read by the watchdog's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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

    @contextmanager
    def inside(self, phase: str, step: int) -> Iterator[None]:
        """The context of a phase."""
        before, name = self.phase, phase
        if phase not in self._entered:
            # a stream may skip what earlier runs have read
            name = FIRST if phase == "data" else f"{phase}{COMPILING}" if self.compiles else phase
        self.move(name, step)
        yield
        self._entered.add(phase)
        self.move(before if before in (START, END) else BETWEEN)
