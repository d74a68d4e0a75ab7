"""Finds the rank that the others wait for, by what it does itself: under data parallelism all ranks' steps take equally long."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import Any

from hpctrain.training.meters.clock import PARTS

_CAUSES: Mapping[str, Sequence[str]] = {
    "data": ("data",),
    "compute": ("forward", "backward", "optimizer"),
    "save": ("checkpoint",),
    "host": ("other",),
}
"""The parts of a rank's time that can be longer than the others', by what is slow then."""
_WINDOW, _LEAST = 5, 4
"""Steps that are looked at, and in how many of them the same rank has to be slow; of saves one is enough."""
_SHARE, _SECONDS = 0.1, 0.01
"""The excess from which on a rank is slow: of the step, and in seconds."""
_COSTLY = 10.0
"""Seconds that a slow rank has cost all others when a warning tells of it."""


@dataclass(frozen=True)
class Straggler:
    """A slow rank, what is slow about it, and the seconds of a step that it takes longer than the others."""

    rank: int
    node: str
    cause: str
    excess_seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The value in a row of metrics."""
        return vars(self)


class Stragglers:
    """Looks at the ranks' own times of each step."""

    def __init__(self, nodes: Sequence[str]) -> None:
        """nodes: of each rank."""
        self._nodes = nodes
        self._seen = {cause: deque[tuple[int, float]](maxlen=1 if cause == "save" else _WINDOW) for cause in _CAUSES}
        self._cost = defaultdict[tuple[int, str], float](float)
        self._has_saved = False

    def see(self, own: Sequence[Sequence[float]], seconds: float) -> Straggler | None:
        """The slow rank, if there is one. own: each rank's seconds by part, in the order of PARTS. seconds: of the step."""
        worst: Straggler | None = None
        for cause, parts in _CAUSES.items():
            places = [PARTS.index(part) for part in parts]
            taken = [sum(one[place] for place in places) for one in own]
            if cause == "save" and not self._is_judged(taken):
                continue
            slowest = max(range(len(taken)), key=taken.__getitem__)
            excess = taken[slowest] - median_low(taken)
            is_slow = excess > max(_SECONDS, _SHARE * seconds)
            self._seen[cause].append((slowest if is_slow else -1, excess))
            found = self._named(cause)
            if found is not None and (worst is None or found.excess_seconds > worst.excess_seconds):
                worst = found
        return worst

    def news(self, found: Straggler) -> str | None:
        """A sentence, once a rank that was found in a step has cost enough; None before and afterwards."""
        key = found.rank, found.cause
        before = self._cost[key]
        self._cost[key] += found.excess_seconds
        if before >= _COSTLY or self._cost[key] < _COSTLY:
            return None
        return (
            f"rank {found.rank} on {found.node} is slow: its {found.cause} takes {found.excess_seconds:.3g} s longer a step than "
            f"that of others, which have waited {self._cost[key]:.0f} s for it"
        )

    def _is_judged(self, taken: Sequence[float]) -> bool:
        """Whether a save of these seconds tells anything: rank 0 prepares the first one of a start for all."""
        self._seen["save"].clear()
        judged, self._has_saved = self._has_saved and any(taken), self._has_saved or any(taken)
        return judged

    def _named(self, cause: str) -> Straggler | None:
        seen = self._seen[cause]
        ranks = [rank for rank, _ in seen if rank >= 0]
        if not ranks:
            return None
        rank = max(set(ranks), key=ranks.count)
        if ranks.count(rank) < (1 if cause == "save" else _LEAST):
            return None
        return Straggler(rank, self._nodes[rank], cause, median(excess for one, excess in seen if one == rank))
