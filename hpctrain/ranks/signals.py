"""The signals that ask a job to stop: how the loop answers them, and how to keep them from child processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing import resource_tracker
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C, termination by a launcher or Slurm, and `#SBATCH --signal=USR1@60` before the time limit."""

_early: list[int] = []
"""Signals from before training could answer them."""
_SAME_SECONDS = 1.0
"""Signals this soon after the first count as the same one: a terminal or Slurm signals every process of a job, and
launchers and `hpctrain run -n` pass signals on."""
STOPPED, INTERRUPTED = 1, 2


def note_early() -> None:
    """Keep a SIGUSR1 from now on until the loop can answer it, instead of ending this process.

    A batch script cannot know whether its ranks have started already when the time limit comes.
    """
    signal.signal(signal.SIGUSR1, lambda number, _: _early.append(number))


def came_early() -> bool:
    """Whether a signal was kept; asked once."""
    came = bool(_early)
    _early.clear()
    return came


def keep_from_children() -> None:
    """Block these signals on this thread; processes that it starts inherit the mask.

    A terminal or Slurm signals every process of a job. The processes that load samples must survive that: the last step
    before the save needs them.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    resource_tracker.ensure_running()  # else it starts with the first process, and unblocks two of these signals
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)


class StopRequest:
    """Active inside a `with`: the first signal asks the loop to stop, a later one ends the process at once."""

    def __init__(self) -> None:
        self.level = 0
        """0 while nothing was asked, STOPPED after a signal, INTERRUPTED after Ctrl-C."""
        self._since = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python sets handlers only there
            self._before = {number: signal.signal(number, self._handle) for number in STOPPING}
            if came_early():
                self._handle(signal.SIGUSR1, None)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.level:
            self.level, self._since = INTERRUPTED if number == signal.SIGINT else STOPPED, time.monotonic()
        elif number != signal.SIGUSR1 and time.monotonic() - self._since > _SAME_SECONDS:
            os._exit(128 + number)
