"""The signals that ask a job to stop, and how to keep them from child processes."""

from __future__ import annotations

import signal
from multiprocessing import resource_tracker

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C, termination by a launcher or Slurm, and `#SBATCH --signal=USR1@60` before the time limit."""

_early: list[int] = []
"""Signals from before training could answer them."""


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
