"""What stands between this rank and the person who started the job."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field


def _tell_nobody(code: int) -> None:
    """The process's own exit code says it."""


def _wait_for_nothing() -> None:
    """Signals come from elsewhere."""


def on_terminal() -> bool:
    """Whether a person sees this process's output as it comes; it may be closed.

    Open MPI's mpiexec gives its ranks a terminal of their own, wherever its own output goes: that one says nothing.
    """
    return sys.stdout is not None and sys.stdout.isatty() and "OMPI_COMM_WORLD_SIZE" not in os.environ


@dataclass(frozen=True)
class Front:
    """A terminal or not, and who wants to hear the exit code; by default this process's own output and nobody.

    answers_signals: to be called when this rank has become ready to be asked to stop.
    """

    terminal: bool = field(default_factory=on_terminal)
    report_exit: Callable[[int], None] = _tell_nobody
    answers_signals: Callable[[], None] = _wait_for_nothing
