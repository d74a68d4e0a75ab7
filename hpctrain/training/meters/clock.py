"""Splits a rank's time among the parts of the training, without waiting for an accelerator."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hpctrain.base.accounting import waited
from hpctrain.base.devices import is_accelerator, mark, seconds_between

PARTS = ("data", "forward", "backward", "communication", "optimizer", "checkpoint", "evaluation", "other")
"""The parts, which add up to the time."""
# the part that each phase of the position counts to; all others to "other"
_PART_OF = {
    "data": "data",
    "counting": "communication",
    "forward": "forward",
    "backward": "backward",
    "sums of gradients": "communication",
    "exchange of figures": "communication",
    "optimizer": "optimizer",
    "save": "checkpoint",
    "evaluation": "evaluation",
}
# parts whose waits for other ranks count as communication
_MIXED = ("forward", "backward", "optimizer", "other")


class Clock:
    """The time between two calls of `take`, by parts.

    A part ends where the next phase begins. On the CPU, waits for other ranks inside of one count as communication. An accelerator
    has its own time: a mark is where its stream gets to, and `take` reports the previous, finished interval.
    """

    def __init__(self, device: torch.device) -> None:
        self._lags = is_accelerator(device)
        self._now: Callable[[], Any] = partial(mark, device) if self._lags else time.perf_counter
        self.restart()

    def restart(self) -> None:
        """Begin anew, with "other"."""
        self._part, self._over = "other", list[tuple[str, Any, Any, float]]()
        self._spans = list[tuple[str, Any, Any, float]]()
        self._begin, self._waited = self._now(), waited()

    def enter(self, phase: str) -> None:
        """A phase begins; `phase` may have more words behind a comma."""
        self._begin_part(_PART_OF.get(phase) or _PART_OF.get(phase.partition(",")[0], "other"))

    def _begin_part(self, part: str) -> None:
        now, waits = self._now(), waited()
        self._spans.append((self._part, self._begin, now, waits - self._waited))
        self._part, self._begin, self._waited = part, now, waits

    def take(self) -> tuple[list[float], list[float]]:
        """Seconds by part since the last call, or of an accelerator those before it: all, and without waits for other ranks."""
        self._begin_part(self._part)
        ready, self._over = (self._over, self._spans) if self._lags else (self._spans, [])
        self._spans = []
        parts, own = defaultdict[str, float](float), defaultdict[str, float](float)
        for part, begin, end, waits in ready:
            seconds = seconds_between(begin, end)
            own[part] += max(0.0, seconds - waits)
            if part in _MIXED:
                waits = min(waits, seconds)
                parts["communication"] += waits
                parts[part] += seconds - waits
            else:
                parts[part] += seconds
        return [parts[name] for name in PARTS], [own[name] for name in PARTS]
