"""The channel between `hpctrain run -n` and its ranks: a directory with a file per pid, a pipe, the exit code.

A rank that is still starting cannot answer a signal yet. Requests to stop are kept until it can.

The starter holds the pipe open. When the starter is killed, the ranks read the end of the pipe and exit, so no orphan
goes on writing; launchers do not guarantee this. The exit code goes through a file, because MPICH ORs the ranks' codes.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hpctrain.base.safe_files import is_closed, temporary_place
from hpctrain.ranks.rank_channel import CODE, ERROR, ERROR_TERMINAL, PIPE, TERMINAL, on_terminal

__all__ = ["ChannelDirectory", "Ending", "ending_in", "sweep"]

_BEGINNING = 60.0  # seconds within which who makes a directory has opened its pipe


class StarterChannel(Protocol):
    """The starter's side of a starter's channel."""

    @property
    def exit_code(self) -> int | None:
        """The exit code that the ranks agreed on; None when none of them told it."""

    @property
    def why_not_started(self) -> str | None:
        """A sentence about ranks that have not started, if that is known."""

    @property
    def failed_host(self) -> str | None:
        """The first host on which a rank failed or did not start, if that is known."""

    def pass_on(self, numbers: Sequence[int]) -> int: ...

    def kill_ranks(self) -> None: ...


class ChannelDirectory:
    """The starter's side, for ranks on this machine."""

    why_not_started: str | None = None
    """Processes start here, or raise an error."""
    failed_host: str | None = None
    """None: it is here, and nobody need be told."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name, stream in ((TERMINAL, sys.stdout), (ERROR_TERMINAL, sys.stderr)):
            if on_terminal(stream):
                (directory / name).touch()  # ranks cannot tell: launchers give them pipes or terminals of their own
        os.mkfifo(directory / PIPE)
        # both ends, so that opening does not wait for a rank and the pipe stays open until this process ends
        self._pipe = os.open(directory / PIPE, os.O_RDWR | os.O_CLOEXEC)
        self._passed_on: dict[Path, int] = {}  # the number of signals sent to each rank

    def pass_on(self, numbers: Sequence[int]) -> int:
        """Send each of these signals once to every rank that can answer; the number of such ranks."""
        ready = list(self.directory.glob("*.ready"))
        for file in ready:
            for number in numbers[self._passed_on.get(file, 0) :]:
                _send(file, number)
            self._passed_on[file] = len(numbers)
        return len(ready)

    def kill_ranks(self) -> None:
        """Kill every rank that has started."""
        for file in self.directory.glob("*.pid"):
            _send(file, signal.SIGKILL)

    @property
    def exit_code(self) -> int | None:
        """The exit code that the ranks agreed on; None when none of them recorded one."""
        return ending_in(self.directory).code

    def close(self) -> None:
        os.close(self._pipe)


@dataclass(frozen=True)
class Ending:
    """How ranks have ended. code: their exit code, None if they have told none, as where they were killed. error: in a line."""

    code: int | None
    error: str


def ending_in(directory: Path) -> Ending:
    """The end of ranks, as they have told it in a starter's directory."""
    code, error = None, ""
    with suppress(OSError, ValueError):
        code = int((directory / CODE).read_text())
    with suppress(OSError):
        error = (directory / ERROR).read_text(errors="replace")
    return Ending(code, error)


def _send(file: Path, number: int) -> None:
    with suppress(OSError, ValueError):  # it has left
        os.kill(int(file.stem), number)


def sweep(pattern: str, seconds: float = _BEGINNING) -> None:
    """Remove those of this user's directories in the temporary directory, by their names, whose pipe no process holds any more and
    which have not changed for `seconds`: a kill has left them."""
    for pipe in temporary_place().glob(f"{pattern}/{PIPE}"):
        with suppress(OSError):  # another user's, or removed meanwhile
            directory, is_pipe = pipe.parent.lstat(), stat.S_ISFIFO(pipe.lstat().st_mode)
            is_old = time.time() - directory.st_mtime > seconds
            if is_closed(directory) and is_pipe and is_old and not _is_read(pipe):
                shutil.rmtree(pipe.parent, ignore_errors=True)


def _is_read(pipe: Path) -> bool:
    """Whether a process has opened a pipe to read from it."""
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW))
    except OSError as error:
        return error.errno != errno.ENXIO
    return True
