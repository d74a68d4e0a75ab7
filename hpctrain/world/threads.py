"""The threads of this process, as the system counts them: libraries in C have some that Python does not know. Linux only."""

from __future__ import annotations

import os
import time

_ENDING = 0.2
"""Seconds after its end in which the system may still list a thread."""


def others() -> int:
    """The number of threads besides one."""
    give_up = time.monotonic() + _ENDING
    while (count := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < give_up:
        time.sleep(0.001)
    return count - 1
