"""Places the ranks, starts them, watches them, and places them anew after a loss: until the job has ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from hpctrain.toolkit.commands import EXIT_STOPPED, EXIT_TRAINING, EXIT_USAGE
from hpctrain_ray.group import Group, Tell
from hpctrain_ray.order import Order
from hpctrain_ray.placement import Placed, place
from hpctrain_ray.seats import LostStartError

_LOOK = 0.25
"""Seconds between two looks at the ranks."""
_GRACE = 10.0
"""Seconds that the other ranks have to end by themselves after one has failed: they notice its closed connections."""


@dataclass(frozen=True)
class _Ended:
    """How a start ended. again: whether another one may do better."""

    code: int
    again: bool = False


class Supervisor:
    """Runs one order to its end. `run` takes one thread; the other methods may be called by any."""

    def __init__(self, order: Order, tell: Tell, say: Callable[[str], None], repeats: bool = False) -> None:
        """tell: gets the ranks' output. say: gets the supervisor's sentences. repeats: whether ranks that have saved and stopped by
        themselves (exit code 75) start again."""
        self._order, self._tell, self._say, self._repeats = order, tell, say, repeats
        self._signals: list[int] = []
        self._begun = time.time()
        self._checkpoints_before = self._checkpoints()
        self.restarts = 0
        """How often the ranks have started again after a loss."""
        self.error = ""
        """The error with which the ranks have ended last, in a line."""
        self.state: Literal["pending", "running"] = "pending"
        self.detail = "for room in the cluster"

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Let the ranks finish their step, save and end; a second signal that asks to end (not SIGUSR1) ends them at once."""
        self._signals.append(number)

    @property
    def was_stopped(self) -> bool:
        """Whether `stop` was called."""
        return bool(self._signals)

    def run(self) -> int:
        """Train the job to its end; its exit code. Raises EnvironmentUnfitError if there is no room, UsageError."""
        while True:
            self.state, self.detail = "pending", "for room in the cluster"
            placed = place(self._order, lambda: bool(self._signals), self._say)
            if placed is None:
                return 128 + self._signals[0] if self._signals[0] != signal.SIGUSR1 else EXIT_STOPPED
            try:
                ended = self._attend(placed, self._resume())
            finally:
                placed.remove()
            if self._signals or not ((self._repeats and ended.code == EXIT_STOPPED) or ended.again):
                return ended.code
            if ended.again:
                if self.restarts == self._order.restarts:
                    return ended.code
                self.restarts += 1
                self._say(f"restart {self.restarts} of {self._order.restarts}")

    def _resume(self) -> str:
        """The checkpoint to go on from. The order's counts until this job has saved: the newest one may be of another course."""
        return "auto" if self._checkpoints() - self._checkpoints_before else self._order.resume

    def _checkpoints(self) -> set[tuple[str, int]]:
        """The run's checkpoints: their names, and when they were made."""
        found = set()
        for path in self._order.output.glob("checkpoints/step-*[0-9]"):
            with suppress(OSError):  # an older one is removed meanwhile
                found.add((path.name, path.stat().st_mtime_ns))
        return found

    def _attend(self, placed: Placed, resume: str) -> _Ended:
        """Start ranks in `placed` and wait for their end."""
        try:
            group = Group(placed, self._order, resume, self._tell, self._begun)
        except LostStartError as error:
            self._say(str(error))
            return _Ended(EXIT_TRAINING, again=True)
        try:
            self.state = "running"
            self.detail = f"on {group.where()}"
            self._say(f"starting {len(group)} rank{'s' * (len(group) > 1)} on {group.where()}")
            self._wait(group)
        finally:
            group.end()
        code, losses = group.code, group.losses()
        if losses:
            self._say("; ".join(losses))
        self.error = group.error
        if code is None:
            code = 128 + self._signals[0] if len(self._signals) > 1 else EXIT_TRAINING
        # what was right before a loss is no mistake of the user's now: the lock of the lost node may last
        again = code == EXIT_TRAINING or (code == EXIT_USAGE and self.restarts > 0)
        return _Ended(code, again)

    def _wait(self, group: Group) -> None:
        """Wait until no rank runs."""
        begin, failed_at, saves = time.monotonic(), None, False
        while not group.has_ended:
            now = time.monotonic()
            saves = saves or (not self._signals and self._is_over(now - begin))
            # the ranks stop already: the first signal asks for no more than that, and another one would end them at once
            group.look([signal.SIGUSR1, *self._signals[1:]] if saves else list(self._signals), _LOOK)
            failed_at = failed_at or (now if group.has_failed or self._is_ended(now - begin) else None)
            if failed_at is not None and now > failed_at + _GRACE:
                break
            time.sleep(_LOOK)

    def _is_over(self, seconds: float) -> bool:
        """Whether it is time to save."""
        order = self._order
        return order.seconds is not None and seconds > order.seconds - order.save_seconds

    def _is_ended(self, seconds: float) -> bool:
        """Whether the start's time is over, or a second signal has come."""
        over = self._order.seconds is not None and seconds > self._order.seconds
        return over or any(number != signal.SIGUSR1 for number in self._signals[1:])
