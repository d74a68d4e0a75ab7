"""This process: its threads, command line and environment as the system shows them (Linux only), and its end."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from hpctrain.base.launcher_variables import by_srun, pmi_descriptor
from hpctrain.contracts.identity import Identity

_ENDING = 0.2
"""Seconds after its end in which the system may still list a thread."""
_BIND = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_AREAS = slice(45, 49)
"""arg_start, arg_end, env_start and env_end among the words behind the command's name in /proc/PID/stat: fields 48 to 51 of
proc(5)."""
ROOM_VARIABLE = "HPCTRAIN_ROOM"
"""Takes the place in a process's environment, as /proc/PID/environ shows it, that variables of its forks take."""
ROOM = "." * 500


def binds_threads(environment: Mapping[str, str]) -> str | None:
    """A variable with which OpenMP chooses the CPUs of its threads, from those that the process has when OpenMP is loaded."""
    return next((name for name in _BIND if environment.get(name, "false").lower() != "false"), None)


def other_threads() -> int:
    """The number of threads besides one."""
    give_up = time.monotonic() + _ENDING
    while (count := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < give_up:
        time.sleep(0.001)
    return count - 1


def show_command(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Make these what `ps`, `pkill -f` and /proc show of this process, as far as the room suffices.

    Libraries may hold pointers to other variables in the process's first environment, so only the room is written to.
    """
    with suppress(OSError, ValueError):
        words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        arguments, end, variables, last = map(int, words[_AREAS])
        _overwrite(arguments, end - arguments, [os.fsencode(word) for word in command])
        room = f"{ROOM_VARIABLE}={ROOM}".encode()
        place = ctypes.string_at(variables, last - variables).find(room)
        if environment is not None and place >= 0:
            pairs = [os.fsencode(f"{name}={value}") for name, value in environment.items()]
            _overwrite(variables + place, len(room) + 1, pairs)


def _overwrite(place: int, size: int, words: Sequence[bytes]) -> None:
    text = b"".join(word + b"\0" for word in words)[: size - 1]
    ctypes.memmove(place, text.ljust(size, b"\0"), size)


def end_process(code: int) -> NoReturn:
    """End this rank with `code` as Python would, but without finalizing the interpreter.

    Gloo's threads free the tensors of their last operations slightly later, and need the interpreter to do so. Python ends
    a thread that asks for the interpreter during finalization. In the middle of C++ code this aborts the process: a rank
    that had finished would exit with 134.
    """
    # Python's own exit begins with these two steps; the first joins the threads and closes thread pools
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        connection = _pmi()
        mpi.Finalize()
        if connection is not None and _pmi() == connection:
            _finalize_pmi(connection[0])
    flush_output()
    os._exit(code)


def _pmi() -> tuple[int, int] | None:
    """The descriptor on which MPICH's mpiexec, or the starter, serves PMI-1, and its inode."""
    number = pmi_descriptor()
    with contextlib.suppress(OSError):
        if number is not None and stat.S_ISSOCK((found := os.fstat(number)).st_mode):
            return number, found.st_ino
    return None


def _finalize_pmi(descriptor: int) -> None:
    """Say that this process ends well, as MPICH 5 does in a handler of exit(), which os._exit leaves out. Otherwise mpiexec would
    kill the other ranks of the node."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.settimeout(1.0)
        connection.sendall(b"cmd=finalize\n")
        connection.recv(1024)  # the acknowledgement


def flush_output() -> None:
    """Flush the output as far as possible."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):  # no space left, no reader, or closed
            stream.flush()


def end_now(identity: Identity, code: int, everybody: bool) -> NoReturn:
    """Exit without cleaning up. Under MPI the launcher ends the other ranks, unless `everybody` leaves."""
    # srun turns every code given to Abort into 137
    if identity.source == "mpi" and identity.size > 1 and not (everybody and by_srun()):
        from hpctrain.mpi.library import abort

        abort(code)
    flush_output()
    if identity.rank == 0 and identity.size > 1:
        time.sleep(1)  # this rank serves the store: the others still read which rank failed
    os._exit(code)
