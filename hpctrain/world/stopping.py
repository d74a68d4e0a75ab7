"""The signals that ask a job to stop, and which processes are not to get them."""

from __future__ import annotations

import signal
from multiprocessing import resource_tracker

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C, the end by a launcher or Slurm, and the signal of `#SBATCH --signal=USR1@60` before the time is up."""


def keep_from_children() -> None:
    """Block these signals on this thread, whose mask the processes that it starts inherit.

    A terminal, or Slurm, signals every process of a job. Processes that load samples must outlive that, since the step
    that is saved needs them.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    resource_tracker.ensure_running()  # it comes with the first process, and lets two of them in again
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
