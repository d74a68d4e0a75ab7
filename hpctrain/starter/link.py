"""What ties ranks to the `hpctrain run -n` that started them: a directory with their pids, a pipe, and the exit code.

The pipe is held open by the starter: when that is killed, the ranks read its end and leave, so no orphan goes on
writing. Launchers give no such promise (and MPICH ORs the ranks' exit codes: the code goes through a file).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from hpctrain.world.front import Front
from hpctrain.world.identity import Identity

_PIPE = "alive"
_CODE = "exit-code"
_TERMINAL = "terminal"


class Link:
    """The starter's side."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if sys.stdout.isatty():
            (directory / _TERMINAL).touch()  # launchers put pipes and terminals of their own in between
        os.mkfifo(directory / _PIPE)
        # both ends: so that opening does not wait for a rank, and the pipe stays open until this process ends
        self._pipe = os.open(directory / _PIPE, os.O_RDWR | os.O_CLOEXEC)

    def signal_ranks(self, number: int) -> None:
        """Send a signal to every rank that has come up."""
        for file in self.directory.glob("*.pid"):
            try:
                os.kill(int(file.read_text()), number)
            except (ProcessLookupError, ValueError):
                continue  # it has left

    @property
    def exit_code(self) -> int | None:
        """What the ranks agreed on; None when none of them could say."""
        try:
            return int((self.directory / _CODE).read_text())
        except (FileNotFoundError, ValueError):
            return None

    def close(self) -> None:
        os.close(self._pipe)


def attach(directory: Path, identity: Identity) -> Front:
    """A rank's side: it can be signalled and leaves with its starter, which is its way to the person."""
    (directory / f"{identity.rank}.pid").write_text(str(os.getpid()))
    threading.Thread(target=_leave_with_starter, args=(directory / _PIPE,), daemon=True).start()

    def report_exit(code: int) -> None:
        """The first code that is recorded is the job's."""
        try:
            with open(directory / _CODE, "x", encoding="ascii") as file:
                file.write(str(code))
        except OSError:
            return  # another rank was first, or the starter is gone

    return Front((directory / _TERMINAL).exists(), report_exit)


def _leave_with_starter(pipe: Path) -> None:
    try:
        with open(pipe, "rb") as alive:
            alive.read()
    except OSError:
        pass
    os.kill(os.getpid(), signal.SIGKILL)
