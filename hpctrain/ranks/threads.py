"""The threads of this process: how many the system counts, since libraries in C have some that Python does not know (Linux only),
and whether OpenMP binds its own."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

_ENDING = 0.2
"""Seconds after its end in which the system may still list a thread."""
_BIND = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def binds_threads(environment: Mapping[str, str]) -> str | None:
    """A variable with which OpenMP chooses the CPUs of its threads, from those that the process has when OpenMP is loaded."""
    return next((name for name in _BIND if environment.get(name, "false").lower() != "false"), None)


def others() -> int:
    """The number of threads besides one."""
    give_up = time.monotonic() + _ENDING
    while (count := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < give_up:
        time.sleep(0.001)
    return count - 1
