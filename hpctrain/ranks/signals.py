"""The signals that ask a job to stop: how the loop answers them, and how to keep them from child processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C, termination by a launcher or Slurm, and `#SBATCH --signal=USR1@60` before the time limit."""
ANSWERED = (*STOPPING, signal.SIGHUP)
"""Signals that ranks have handlers for."""

_early: list[int] = []  # signals from before training could answer them
# Signals this soon after the first count as the same one: a terminal or Slurm signals every process of a job, and
# launchers and `hpctrain run -n` pass signals on.
_SAME_SECONDS = 1.0
STOPPED, INTERRUPTED = 1, 2


def note_early() -> None:
    """Keep a SIGUSR1 from now on until the loop can answer it, instead of ending this process, and train on after a SIGHUP.

    A batch script cannot know whether its ranks have started already when the time limit comes. SIGHUP says that the terminal is
    closed; a handler, unlike SIG_IGN, ends with exec, so that the programs of users' code keep Python's answer.
    """
    signal.signal(signal.SIGUSR1, lambda number, _: _early.append(number))
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, lambda *_: None)


def keep_from_children() -> None:
    """Block these signals on this thread; processes that it starts inherit the mask, and import nothing of the current directory.

    A terminal or Slurm signals every process of a job. The processes that load samples must survive that: the last step
    before the save needs them.
    """
    from multiprocessing import resource_tracker

    from hpctrain.base.child_python import guard_multiprocessing

    guard_multiprocessing()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    resource_tracker.ensure_running()  # else it starts with the first process, and unblocks two of these signals
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)


_forking = threading.local()


def _hold_signals() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ANSWERED)


def _let_signals_come() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _answer_as_python() -> None:
    """A fork of users' code, such as a worker of `multiprocessing`, ends by its parent's SIGTERM, which a rank would answer."""
    for number in ANSWERED:
        if str(getattr(signal.getsignal(number), "__module__", "")).startswith("hpctrain."):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _let_signals_come()


# Held from before the fork until the handlers are changed: a signal in between would be lost.
os.register_at_fork(before=_hold_signals, after_in_parent=_let_signals_come, after_in_child=_answer_as_python)


class StopRequest:
    """Active inside a `with`: the first signal asks the loop to stop, a later one ends the process at once."""

    def __init__(self) -> None:
        self.level = 0
        """0 while nothing was asked, STOPPED after a signal, INTERRUPTED after Ctrl-C."""
        self.is_urgent = False
        """Whether it was another signal than SIGUSR1, which leaves time for a step."""
        self._since = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python sets handlers only there
            self._before = {number: signal.signal(number, self._handle) for number in STOPPING}
            if _early:
                _early.clear()
                self._handle(signal.SIGUSR1, None)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.level:
            self.level, self._since = INTERRUPTED if number == signal.SIGINT else STOPPED, time.monotonic()
            self.is_urgent = number != signal.SIGUSR1
        elif number != signal.SIGUSR1 and time.monotonic() - self._since > _SAME_SECONDS:
            os._exit(128 + number)
