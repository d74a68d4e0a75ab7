"""This process as the system shows it: its threads, its command line and its environment. Linux only."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_ENDING = 0.2
"""Seconds after its end in which the system may still list a thread."""
_BIND = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def binds_threads(environment: Mapping[str, str]) -> str | None:
    """A variable with which OpenMP chooses the CPUs of its threads, from those that the process has when OpenMP is loaded."""
    return next((name for name in _BIND if environment.get(name, "false").lower() != "false"), None)


def other_threads() -> int:
    """The number of threads besides one."""
    give_up = time.monotonic() + _ENDING
    while (count := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < give_up:
        time.sleep(0.001)
    return count - 1


_AREAS = slice(45, 49)
"""arg_start, arg_end, env_start and env_end among the words behind the command's name in /proc/PID/stat: fields 48 to 51 of
proc(5)."""
ROOM_VARIABLE = "HPCTRAIN_ROOM"
"""Takes the place in a process's environment, as /proc/PID/environ shows it, that variables of its forks take."""
ROOM = "." * 500


def show_command(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Make these what `ps`, `pkill -f` and /proc show_command of this process, as far as the room suffices.

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
