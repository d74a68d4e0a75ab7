"""A rank's side of its starter's directory: a file per pid, a pipe, exit code and error. `ChannelDirectory` is the starter's."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.base.launcher_variables import STARTER_VARIABLE
from hpctrain.base.safe_files import is_closed, temporary_place
from hpctrain.ranks.rank_channel import RankChannel
from hpctrain.ranks.starter_streams import attach_to_mpiexec, is_word

PIPE = "alive"
CODE, ERROR = "exit-code", "error"
_BEGINNING = 60.0
"""Seconds within which who makes a directory has opened its pipe."""
TERMINAL, ERROR_TERMINAL = "terminal", "error-terminal"


def own_channel(environment: Mapping[str, str] = os.environ) -> RankChannel:
    """The channel of a program that is a rank: to the starter of `started_variables`, if one has started it."""
    directory = environment.get(STARTER_VARIABLE)
    return RankChannel() if directory is None else attach_to_directory(Path(directory))


def attach(directory: Path) -> RankChannel:
    """A rank's side: the starter can signal the rank and shows its output, and the rank exits with the starter.

    directory: the starter's, or the word of starter_streams.py for ranks on several hosts.

    Call it before MPI starts: MPI's wait for the other ranks would outlast the starter. Raises EnvironmentUnfitError.
    """
    return attach_to_mpiexec(str(directory)) if is_word(str(directory)) else attach_to_directory(directory)


def attach_to_directory(directory: Path) -> RankChannel:
    """The starter can signal the rank and shows its output, and the rank exits with the starter.

    Raises EnvironmentUnfitError for a directory that another user may have made after a starter's was removed.
    """
    with suppress(OSError):  # the starter was killed: the thread notices
        if not is_closed(directory.lstat()):
            raise EnvironmentUnfitError(
                f"found the starter's directory {directory}, expected one of this user's that is closed to others"
            )
        (directory / f"{os.getpid()}.pid").touch()
    threading.Thread(target=_leave_with_starter, args=(directory,), daemon=True).start()

    def record(name: str, text: str) -> None:
        """Write a file unless another rank has written it: the first is the job's."""
        with suppress(OSError), open(directory / name, "x", encoding="utf-8") as file:  # or the starter is gone
            file.write(text)

    terminal, error_terminal = (directory / TERMINAL).exists(), (directory / ERROR_TERMINAL).exists()
    return RankChannel(
        terminal,
        error_terminal,
        report_exit=lambda code: record(CODE, str(code)),
        answers_signals=(directory / f"{os.getpid()}.ready").touch,
        report_error=lambda error: record(ERROR, error),
    )


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


def _leave_with_starter(directory: Path) -> None:
    with suppress(OSError):
        # not blocking: a starter killed before this rank started will never open the other end
        alive = os.open(directory / PIPE, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(alive, True)
        os.read(alive, 1)
    shutil.rmtree(directory, ignore_errors=True)  # the starter was killed before it could
    os.kill(os.getpid(), signal.SIGKILL)
