"""Makes a forked process a rank: it begins as a rank that was started anew does. Linux only."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Collection, Mapping, Sequence

from hpctrain.base.launcher_variables import set_variables
from hpctrain.ranks.process import show_command
from hpctrain.starting.pmi import FD_VARIABLE

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def end_with_parent(number: int) -> None:
    """Let this process get the signal when its parent has ended; 0: let it not."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, number)


def open_streams() -> None:
    """Open the null device in place of a standard stream that is closed: the next file would be taken for it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one


def become_rank(
    parent: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    descriptors: Sequence[int],
    mask: Collection[int],
) -> None:
    """Set what differs between ranks, and what a new process has of its own.

    descriptors: those of PMI, if any, the rank's end first. mask: of signals. Python
    itself seeds `random` anew in a forked process; torch's generator begins alike in every process.
    """
    import numpy as np  # here, where it is imported already: the server's first look at its messages must not wait for it

    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it has ended already
    os.setsid()  # Ctrl-C must reach the ranks from the starter only
    own = {**environment, **({FD_VARIABLE: str(descriptors[0])} if descriptors else {})}
    os.environ.update(own)
    set_variables()  # as the import of hpctrain.mpi does
    show_command(command, own)
    np.random.seed()
    multiprocessing.current_process().authkey = os.urandom(32)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
