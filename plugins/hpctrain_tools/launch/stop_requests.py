"""Requests that running ranks stop: signals to this process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from hpctrain.ranks.signals import STOPPING


class Signals(list[int]):
    """The signals that ask to stop, as they arrive."""

    has_ranks = True
    """Whether ranks answer them; where none run yet, this process ends at the second."""

    @property
    def again(self) -> int | None:
        """The first signal after the initial one that asks to end (not SIGUSR1); None if there is none."""
        return next((number for number in self[1:] if number != signal.SIGUSR1), None)

    def note(self, number: int, _: object) -> None:
        """Handle a signal."""
        self.append(number)
        if not self.has_ranks and self.again is not None:
            raise SystemExit(128 + number)


@contextmanager
def noted_signals() -> Iterator[Signals]:
    """The signals that ask to stop, as they arrive in this context."""
    signals = Signals()
    for number in STOPPING:
        signal.signal(number, signals.note)
    try:
        yield signals
    finally:
        # a signal that arrives now must not change the exit code; unlike a handler, SIG_IGN outlasts the interpreter
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)
