"""Signals set a flag that the loop reads at the step boundary. The handler writes no file and sends nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

from hpctrain.ranks.stopping import STOPPING, came_early

_SAME_SECONDS = 1.0
"""Signals this soon after the first count as the same one: a terminal or Slurm signals every process of a job, and
launchers and `hpctrain run -n` pass signals on."""

STOPPED, INTERRUPTED = 1, 2


class StopRequest:
    """Active inside a `with`: the first signal asks the loop to stop, a later one ends the process at once."""

    def __init__(self) -> None:
        self.level = 0
        """0 while nothing was asked, STOPPED after a signal, INTERRUPTED after Ctrl-C."""
        self._since = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python sets handlers only there
            self._before = {number: signal.signal(number, self._handle) for number in STOPPING}
            if came_early():
                self._handle(signal.SIGUSR1, None)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.level:
            self.level, self._since = INTERRUPTED if number == signal.SIGINT else STOPPED, time.monotonic()
        elif number != signal.SIGUSR1 and time.monotonic() - self._since > _SAME_SECONDS:
            os._exit(128 + number)
