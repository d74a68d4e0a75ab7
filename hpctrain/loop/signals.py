"""Signals set a flag; the loop asks for it at the step boundary. No file is written and nothing sent in a handler."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

from hpctrain.world.stopping import STOPPING

_SAME_SECONDS = 1.0
"""What comes so soon after the first signal is taken for the same one: a terminal, or Slurm, signals every process of a job, and
launchers and `hpctrain run -n` pass on what they get."""


class StopRequest:
    """Active inside a `with`: the first signal asks the loop to stop, a later one ends the process at once."""

    def __init__(self) -> None:
        self.requested = False
        self._since = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python sets handlers nowhere else
            self._before = {number: signal.signal(number, self._handle) for number in STOPPING}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested, self._since = True, time.monotonic()
        elif number != signal.SIGUSR1 and time.monotonic() - self._since > _SAME_SECONDS:
            os._exit(128 + number)
