"""A rank's connection to its starter: whether a terminal shows its output, and where its exit code and its error go."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO

from hpctrain.base.launcher_variables import by_open_mpi


def _tell_nobody(code: int) -> None:
    """The process's own exit code is enough."""


def _print_only(error: str) -> None:
    """The error is on the screen."""


def _wait_for_nothing() -> None:
    """Signals come from elsewhere."""


def on_terminal(stream: TextIO | None) -> bool:
    """Whether a standard stream of this process, which may be closed (None), goes to a terminal.

    Open MPI's mpiexec gives its ranks a terminal of their own, wherever its own output goes. That terminal does not count.
    """
    if stream is None or os.environ.get("TERM") == "dumb":  # it can't draw a bar
        return False
    return stream.isatty() and not by_open_mpi(os.environ)


@dataclass(frozen=True)
class RankChannel:
    """Whether a terminal shows standard output, and whether one shows standard error; the receiver of the exit code. By default:
    this process's own streams, and no receiver.

    report_error: gets the error with which the ranks end, in a line, on the rank that prints it; before the exit code.
    answers_signals: called when this rank can answer a request to stop.
    """

    terminal: bool = field(default_factory=lambda: on_terminal(sys.stdout))
    error_terminal: bool = field(default_factory=lambda: on_terminal(sys.stderr))
    report_exit: Callable[[int], None] = _tell_nobody
    answers_signals: Callable[[], None] = _wait_for_nothing
    report_error: Callable[[str], None] = _print_only
