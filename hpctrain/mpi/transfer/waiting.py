"""Waits without occupying a core that another process could use."""

from __future__ import annotations

import enum
import math
import os
import time
from collections.abc import Callable

_SPIN = 100e-6  # seconds of testing without sleep: longer than a small message takes
_LONGEST_SLEEP = 1e-3  # seconds
_SHORT_SLEEP = 50e-6  # seconds
_TESTS_PER_LOOK = 8  # tests between two looks at the clock
# Tests before the first yield: on a busy machine a yielded core comes back milliseconds later.
_EAGER_TESTS = 50  # some 20 microseconds


class Patience(enum.Enum):
    """How to spend the time between two tests.

    NONE: only yield. SHORT: sleep briefly. LONG: yield for a moment, then sleep a tenth of the time waited so far, so
    that latency grows by at most a tenth.
    """

    NONE = enum.auto()
    SHORT = enum.auto()
    LONG = enum.auto()


def wait_until(
    test: Callable[[], bool],
    deadline: float,
    patience: Patience,
    *,
    notice_after: float = math.inf,
    notice: Callable[[], None] = lambda: None,
) -> bool:
    """Call `test` until it is true; return False if `deadline` (on time.perf_counter()) passes first.

    notice: called once after `notice_after` seconds.
    """
    for _ in range(1 if patience is Patience.SHORT else _EAGER_TESTS):
        if test():
            return True
    start = time.perf_counter()
    noticed = False
    while True:
        for _ in range(1 if patience is Patience.SHORT else _TESTS_PER_LOOK):
            # If ranks outnumber cores, the rank that we wait for needs this core.
            os.sched_yield()
            if test():
                return True
        now = time.perf_counter()
        waited = now - start
        if now > deadline:
            return False
        if waited > notice_after and not noticed:
            notice()
            noticed = True
        if patience is Patience.SHORT:
            time.sleep(_SHORT_SLEEP)
        elif patience is Patience.LONG and waited > _SPIN:
            time.sleep(min(waited / 10, _LONGEST_SLEEP))
