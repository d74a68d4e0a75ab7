"""Passes a launcher's output on: launchers end their ranks when they can't write it, on a full disk for instance."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import IO

_CHUNK = 2**16
_LEFT = 5.0
"""Seconds for the remaining output when the launcher has ended."""


class Relay:
    """Runs from the start of the launcher, whose outputs are pipes. Output that cannot be written (a full disk, a reader that
    is gone) is dropped."""

    def __init__(self, launcher: subprocess.Popen[bytes]) -> None:
        assert launcher.stdout is not None and launcher.stderr is not None
        pairs = ((launcher.stdout, sys.stdout), (launcher.stderr, sys.stderr))
        self._threads = [
            threading.Thread(target=_pass_on, args=(source, into.fileno()), daemon=True) for source, into in pairs
        ]
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Wait until all output is passed on."""
        for thread in self._threads:
            thread.join(_LEFT)


def _pass_on(source: IO[bytes], into: int) -> None:
    while chunk := os.read(source.fileno(), _CHUNK):
        try:
            while chunk:
                chunk = chunk[os.write(into, chunk) :]
        except OSError:
            continue
