"""A rank's connection to its starter: whether a terminal shows its output, and where its exit code and its error go.

A starter on this machine has a directory with a file per pid, a pipe, exit code and error (`ChannelDirectory` is its side). One on
another host has the standard streams of mpiexec, as hpctrain_tools/launch/channel_streams.py says.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.base.launcher_variables import STARTER_VARIABLE, mpiexec_rank
from hpctrain.base.safe_files import is_closed

PIPE = "alive"
CODE, ERROR = "exit-code", "error"
TERMINAL, ERROR_TERMINAL = "terminal", "error-terminal"
WORD = "mpiexec"
"""The word in place of a directory in `--started-by`."""
ON_TERMINAL, ERRORS_ON_TERMINAL = ":terminal", ":error-terminal"
"""Additions behind the word, in this order."""


def on_terminal(stream: TextIO | None) -> bool:
    """Whether a standard stream of this process, which may be closed (None), goes to a terminal.

    Open MPI's mpiexec gives its ranks a terminal of their own, wherever its own output goes. That terminal does not count.
    """
    if stream is None or os.environ.get("TERM") == "dumb":  # it can't draw a bar
        return False
    return stream.isatty() and "OMPI_COMM_WORLD_SIZE" not in os.environ


@dataclass(frozen=True)
class RankChannel:
    """Whether a terminal shows standard output, and whether one shows standard error; the receiver of the exit code. By default:
    this process's own streams, and no receiver.

    report_error: gets the error with which the ranks end, in a line, on the rank that prints it; before the exit code.
    answers_signals: called when this rank can answer a request to stop.
    """

    terminal: bool = field(default_factory=lambda: on_terminal(sys.stdout))
    error_terminal: bool = field(default_factory=lambda: on_terminal(sys.stderr))
    report_exit: Callable[[int], None] = lambda code: None
    answers_signals: Callable[[], None] = lambda: None
    report_error: Callable[[str], None] = lambda error: None


def own_channel(environment: Mapping[str, str] = os.environ) -> RankChannel:
    """The channel of a program that is a rank: to the starter of `started_variables`, if one has started it."""
    directory = environment.get(STARTER_VARIABLE)
    return RankChannel() if directory is None else attach_to_directory(Path(directory))


def attach(directory: Path) -> RankChannel:
    """A rank's side: the starter can signal the rank and shows its output, and the rank exits with the starter.

    directory: the starter's, or a word for ranks on several hosts.

    Call it before MPI starts: MPI's wait for the other ranks would outlast the starter. Raises EnvironmentUnfitError.
    """
    word = str(directory)
    return attach_to_mpiexec(word) if word.partition(":")[0] == WORD else attach_to_directory(directory)


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


def _leave_with_starter(directory: Path) -> None:
    with suppress(OSError):
        # not blocking: a starter killed before this rank started will never open the other end
        alive = os.open(directory / PIPE, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(alive, True)
        os.read(alive, 1)
    shutil.rmtree(directory, ignore_errors=True)  # the starter was killed before it could
    os.kill(os.getpid(), signal.SIGKILL)


def attach_to_mpiexec(text: str) -> RankChannel:
    """A rank's side. Call it before MPI starts: the starter counts the ranks that have started."""
    rank = mpiexec_rank()
    out = os.dup(2)  # what users' code does to standard error does not matter
    ready = threading.Event()
    if rank == 0:
        read = os.dup(0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # processes that the rank starts must not take the signals
        threading.Thread(target=_take_signals, args=(read, ready), daemon=True).start()

    def say(what: str, number: int) -> None:
        with suppress(OSError):  # the launcher is gone, and ends the ranks
            os.write(out, f"\x1ehpctrain {what} {number}\x1f".encode())

    def answers_signals() -> None:
        ready.set()
        say("ready", rank)

    say("started", rank)
    terminal, error_terminal = ON_TERMINAL in text, ERRORS_ON_TERMINAL in text
    return RankChannel(terminal, error_terminal, lambda code: say("exit", code), answers_signals)


def _take_signals(read: int, ready: threading.Event) -> None:
    with os.fdopen(read, "rb") as lines:
        for line in lines:
            ready.wait()
            if line.strip().isdigit():
                os.kill(os.getpid(), int(line))
