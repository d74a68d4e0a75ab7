"""What a forked process sets right before it becomes a rank: it begins as a rank that was started anew does. Linux only."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpctrain.launcher_variables import set_variables
from hpctrain.starter.pmi import FD_VARIABLE

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_AREAS = slice(45, 49)
"""arg_start, arg_end, env_start and env_end among the words behind the command's name in /proc/PID/stat: fields 48 to 51 of
proc(5)."""
ROOM_VARIABLE = "HPCTRAIN_ROOM"
"""Takes the place in the fork server's environment, as /proc/PID/environ shows it, that a rank's own variables take."""
ROOM = "." * 500


def end_with_parent(number: int) -> None:
    """From now on this process gets the signal when its parent has ended; 0: it does not."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, number)


def become_rank(
    parent: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    descriptors: Sequence[int],
    mask: Collection[int],
) -> None:
    """Set what differs between ranks, and what a new process has of its own.

    descriptors: those of PMI, if any, the rank's end first. mask: of signals. Python itself seeds `random` anew in a forked
    process; torch's generator begins alike in every process.
    """
    import numpy as np  # here, where it is imported already: the server's first look at its messages must not wait for it

    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it has ended already
    os.setsid()  # Ctrl-C must reach the ranks from the starter only
    own = {**environment, **({FD_VARIABLE: str(descriptors[0])} if descriptors else {})}
    os.environ.update(own)
    set_variables()  # as the import of hpctrain.mpi does
    _show(command, own)
    np.random.seed()
    multiprocessing.current_process().authkey = os.urandom(32)
    gc.enable()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _show(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Make these what `ps`, `pkill -f` and /proc show of this process, as far as the room suffices.

    Libraries may hold pointers to other variables in the process's first environment, so only the room is written to.
    """
    with suppress(OSError, ValueError):
        words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        arguments, end, variables, last = map(int, words[_AREAS])
        _overwrite(arguments, end - arguments, [os.fsencode(word) for word in command])
        room = f"{ROOM_VARIABLE}={ROOM}".encode()
        place = ctypes.string_at(variables, last - variables).find(room)
        if place >= 0:
            pairs = [os.fsencode(f"{name}={value}") for name, value in environment.items()]
            _overwrite(variables + place, len(room) + 1, pairs)


def _overwrite(place: int, size: int, words: Sequence[bytes]) -> None:
    text = b"".join(word + b"\0" for word in words)[: size - 1]
    ctypes.memmove(place, text.ljust(size, b"\0"), size)
