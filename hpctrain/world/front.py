"""What stands between this rank and the person who started the job."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field


def _tell_nobody(code: int) -> None:
    """The process's own exit code says it."""


def _wait_for_nothing() -> None:
    """Signals come from elsewhere."""


@dataclass(frozen=True)
class Front:
    """A terminal or not, and who wants to hear the exit code; by default this process's own output and nobody.

    answers_signals: to be called when this rank has become ready to be asked to stop.
    """

    terminal: bool = field(default_factory=lambda: sys.stdout.isatty())
    report_exit: Callable[[int], None] = _tell_nobody
    answers_signals: Callable[[], None] = _wait_for_nothing
