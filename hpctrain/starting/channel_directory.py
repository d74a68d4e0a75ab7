"""The channel between `hpctrain run -n` and its ranks: a directory with a file per pid, a pipe, the exit code.

A rank that is still starting cannot answer a signal yet. Requests to stop are kept until it can.

The starter holds the pipe open. When the starter is killed, the ranks read the end of the pipe and exit, so no orphan
goes on writing; launchers do not guarantee this. The exit code goes through a file, because MPICH ORs the ranks' codes.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.ranks.rank_channel import RankChannel, on_terminal
from hpctrain.starting.channel_streams import attach_to_mpiexec, is_word

_PIPE = "alive"
_CODE = "exit-code"
_TERMINAL, _ERROR_TERMINAL = "terminal", "error-terminal"


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
        for name, stream in ((_TERMINAL, sys.stdout), (_ERROR_TERMINAL, sys.stderr)):
            if on_terminal(stream):
                (directory / name).touch()  # ranks cannot tell: launchers give them pipes or terminals of their own
        os.mkfifo(directory / _PIPE)
        # both ends, so that opening does not wait for a rank and the pipe stays open until this process ends
        self._pipe = os.open(directory / _PIPE, os.O_RDWR | os.O_CLOEXEC)
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
        try:
            return int((self.directory / _CODE).read_text())
        except (FileNotFoundError, ValueError):
            return None

    def close(self) -> None:
        os.close(self._pipe)


def attach(directory: Path) -> RankChannel:
    """A rank's side: the starter can signal the rank and shows its output, and the rank exits with the starter.

    directory: the starter's, or the word of streams.py for ranks on several hosts.

    Call it before MPI starts: MPI's wait for the other ranks would outlast the starter.
    EnvironmentUnfitError for a directory that another user may have made after a starter's was removed.
    """
    if is_word(str(directory)):
        return attach_to_mpiexec(str(directory))
    if not is_private(directory):
        raise EnvironmentUnfitError(
            f"--started-by {directory}: expected a directory of this user's that is closed to others"
        )
    with suppress(OSError):  # the starter was killed: the thread notices
        (directory / f"{os.getpid()}.pid").touch()
    threading.Thread(target=_leave_with_starter, args=(directory,), daemon=True).start()

    def report_exit(code: int) -> None:
        """Record `code` unless another rank has recorded one: the first is the job's."""
        try:
            with open(directory / _CODE, "x", encoding="ascii") as file:
                file.write(str(code))
        except OSError:
            return  # another rank was first, or the starter is gone

    terminal, error_terminal = (directory / _TERMINAL).exists(), (directory / _ERROR_TERMINAL).exists()
    return RankChannel(terminal, error_terminal, report_exit, (directory / f"{os.getpid()}.ready").touch)


def is_private(directory: Path) -> bool:
    """Whether it is this user's and closed to others, or not there."""
    try:
        found = os.lstat(directory)
    except FileNotFoundError:
        return True  # the starter was killed: the thread notices
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700


def _send(file: Path, number: int) -> None:
    with suppress(OSError, ValueError):  # it has left
        os.kill(int(file.stem), number)


def _leave_with_starter(directory: Path) -> None:
    with suppress(OSError):
        # not blocking: a starter killed before this rank started will never open the other end
        alive = os.open(directory / _PIPE, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(alive, True)
        os.read(alive, 1)
    shutil.rmtree(directory, ignore_errors=True)  # the starter was killed before it could
    os.kill(os.getpid(), signal.SIGKILL)
