"""The channel between `hpctrain run -n` and its ranks: a directory with a file per pid, a pipe, the exit code.

A rank that is still starting cannot answer a signal yet. Requests to stop are kept until it can.

The starter holds the pipe open. When the starter is killed, the ranks read the end of the pipe and exit, so no orphan
goes on writing; launchers do not guarantee this. The exit code goes through a file, because MPICH ORs the ranks' codes.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hpctrain.ranks.rank_channel import RankChannel, on_terminal
from hpctrain.ranks.starter_directory import CODE, ERROR, ERROR_TERMINAL, PIPE, TERMINAL, attach_to_directory
from hpctrain.ranks.starter_directory import sweep as sweep
from hpctrain.starting.channel_streams import attach_to_mpiexec, is_word

__all__ = ["ChannelDirectory", "Ending", "ending_in", "sweep"]


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


def attach(directory: Path) -> RankChannel:
    """A rank's side: the starter can signal the rank and shows its output, and the rank exits with the starter.

    directory: the starter's, or the word of channel_streams.py for ranks on several hosts.

    Call it before MPI starts: MPI's wait for the other ranks would outlast the starter. Raises EnvironmentUnfitError.
    """
    return attach_to_mpiexec(str(directory)) if is_word(str(directory)) else attach_to_directory(directory)


def _send(file: Path, number: int) -> None:
    with suppress(OSError, ValueError):  # it has left
        os.kill(int(file.stem), number)
