"""The launcher channel between `hpctrain run -n` and its ranks: a directory with a file per pid, a pipe, the exit code.

A rank that is still coming up cannot answer a signal yet, so a request to stop is kept for it until it can.

The starter holds the pipe open. When it is killed, the ranks read the end of the pipe and leave, so no orphan goes on
writing. Launchers promise nothing of the kind. The exit code goes through a file, since MPICH ORs the ranks' codes.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hpctrain.errors import EnvironmentUnfitError
from hpctrain.world.launcher_channel import LauncherChannel, on_terminal

_PIPE = "alive"
_CODE = "exit-code"
_TERMINAL = "terminal"


class Link:
    """The starter's side."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if on_terminal():
            (directory / _TERMINAL).touch()  # launchers put pipes and terminals of their own in between
        os.mkfifo(directory / _PIPE)
        # both ends: so that opening does not wait for a rank, and the pipe stays open until this process ends
        self._pipe = os.open(directory / _PIPE, os.O_RDWR | os.O_CLOEXEC)
        self._passed_on: dict[Path, int] = {}  # how many signals each rank has got

    def pass_on(self, numbers: Sequence[int]) -> int:
        """Send these signals, each once, to every rank that answers them by now; how many ranks do."""
        ready = list(self.directory.glob("*.ready"))
        for file in ready:
            for number in numbers[self._passed_on.get(file, 0) :]:
                _send(file, number)
            self._passed_on[file] = len(numbers)
        return len(ready)

    def kill_ranks(self) -> None:
        """End every rank that has come up."""
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


def attach(directory: Path) -> LauncherChannel:
    """A rank's side: the starter can signal it and shows its output, and it leaves with the starter.

    To be called before MPI starts, whose wait for the other ranks would outlast the starter.
    EnvironmentUnfitError for a directory that another user could have made in the place of a starter's that is gone.
    """
    if not _is_private(directory):
        raise EnvironmentUnfitError(
            f"--started-by {directory}: expected a directory of this user's that is closed to others"
        )
    with suppress(OSError):  # the starter was killed: the thread finds out
        (directory / f"{os.getpid()}.pid").touch()
    threading.Thread(target=_leave_with_starter, args=(directory,), daemon=True).start()

    def report_exit(code: int) -> None:
        """The first code that is recorded is the job's."""
        try:
            with open(directory / _CODE, "x", encoding="ascii") as file:
                file.write(str(code))
        except OSError:
            return  # another rank was first, or the starter is gone

    return LauncherChannel((directory / _TERMINAL).exists(), report_exit, (directory / f"{os.getpid()}.ready").touch)


def _is_private(directory: Path) -> bool:
    try:
        found = os.lstat(directory)
    except FileNotFoundError:
        return True  # the starter was killed: the thread finds out
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700


def _send(file: Path, number: int) -> None:
    with suppress(OSError, ValueError):  # it has left
        os.kill(int(file.stem), number)


def _leave_with_starter(directory: Path) -> None:
    with suppress(OSError):
        # not blocking: a starter that was killed before this rank came up never opens the other end again
        alive = os.open(directory / _PIPE, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(alive, True)
        os.read(alive, 1)
    shutil.rmtree(directory, ignore_errors=True)  # a starter that was killed could not
    os.kill(os.getpid(), signal.SIGKILL)
