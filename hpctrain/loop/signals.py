"""Signals set a flag; the loop asks for it at the step boundary. No file is written and nothing sent in a handler."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C, the launcher's or Slurm's end, and what `#SBATCH --signal=USR1@60` sends before the time is up."""


class StopRequest:
    """Active inside a `with`: the first signal asks the loop to stop, the second ends the process at once."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python sets handlers nowhere else
            self._before = {number: signal.signal(number, self._handle) for number in _STOPPING}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number != signal.SIGUSR1:
            os._exit(128 + number)
        self.requested = True
