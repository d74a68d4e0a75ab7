"""Requests that running ranks stop: signals to this process, and slots for more ranks."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
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


class StopRequests:
    """The requests of one start."""

    def __init__(self, signals: Signals, has_more: Callable[[], bool] = lambda: False) -> None:
        """signals: those that this process has got, and will get. has_more: whether more ranks could run."""
        self.signals, self._has_more = signals, has_more
        self.grows = False
        """Whether the ranks were asked to save, so that more can start."""

    def present(self) -> tuple[int, ...]:
        """The signals for the ranks, in order."""
        if not self.grows and not self.signals:
            self.grows = self._has_more()
        # the ranks stop already: the first signal asks for no more than that, and another one would end them at once
        return (signal.SIGUSR1, *self.signals[1:]) if self.grows else tuple(self.signals)


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
