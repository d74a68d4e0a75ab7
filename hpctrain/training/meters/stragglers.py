"""Finds the rank that the others wait for, by what it does itself: under data parallelism all ranks' steps take equally long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median_low

from hpctrain.training.meters.clock import PARTS

_SAVE = "save"
# the parts of a rank's time that can be longer than the others', by what is slow then
_CAUSES: Mapping[str, Sequence[str]] = {
    "data": ("data",),
    "compute": ("forward", "backward", "optimizer"),
    _SAVE: ("checkpoint",),
    "host": ("other",),
}
# steps and their seconds that are looked at, at least: on a busy machine any rank is slow for a moment
_STEPS, _SPAN = 5, 5.0
# the share of these steps in which the same rank has to be slow
_LEAST = 0.8
# the excess from which on a rank is slow: of the step, in seconds, and in seconds of a save, which is judged by itself
_SHARE, _SECONDS, _OF_SAVE = 0.1, 0.01, 0.2


@dataclass(frozen=True)
class Straggler:
    """A slow rank, what is slow about it, and the seconds of a step that it takes longer than the others."""

    rank: int
    node: str
    cause: str
    excess_seconds: float


class _Stretch:
    """The steps since the last judgement: the rank that was slow in each, and its excess; and the rank named then."""

    def __init__(self) -> None:
        self._steps, self._seconds = list[tuple[int | None, float]](), 0.0
        self._slow: tuple[int, float] | None = None

    def add(self, rank: int | None, excess: float, seconds: float) -> tuple[int, float] | None:
        """The rank that is slow, and its mean excess, after another step. rank: the slow one in that step, if there is one."""
        # in stretches, as a look at a sliding window would cost more in each step than short steps take
        self._steps.append((rank, excess))
        self._seconds += seconds
        if len(self._steps) >= _STEPS and self._seconds >= _SPAN:
            (most, count), *_ = Counter(rank for rank, _ in self._steps).most_common(1)
            self._slow = None
            if most is not None and count >= _LEAST * len(self._steps):
                self._slow = most, fmean(one for rank, one in self._steps if rank == most)
            self._steps, self._seconds = [], 0.0
        return self._slow


class Stragglers:
    """Looks at the ranks' own times of each step."""

    def __init__(self, nodes: Sequence[str]) -> None:
        """nodes: of each rank."""
        self._nodes = nodes
        self._stretches = {cause: _Stretch() for cause in _CAUSES if cause != _SAVE}
        self._has_saved = False

    def see(self, own: Sequence[Sequence[float]], parts: Sequence[Sequence[float]], seconds: float) -> Straggler | None:
        """The slow rank, if there is one. own, parts: each rank's. seconds: of the step."""
        slow = [self._slow(cause, own, parts, seconds) for cause in _CAUSES]
        return max((one for one in slow if one is not None), key=lambda one: one.excess_seconds, default=None)

    def _slow(
        self, cause: str, own: Sequence[Sequence[float]], parts: Sequence[Sequence[float]], seconds: float
    ) -> Straggler | None:
        places = [PARTS.index(part) for part in _CAUSES[cause]]
        taken, spent = ([sum(one[place] for place in places) for one in times] for times in (own, parts))
        # where all load equally slowly, one waits for its data and the others for that one, and load ahead meanwhile
        of_own, of_step = median_low(taken), median_low(spent)
        excesses = [
            min(one - of_own, other - of_step) if cause == "data" else one - of_own
            for one, other in zip(taken, spent, strict=True)
        ]
        slowest = max(range(len(taken)), key=excesses.__getitem__)
        excess = excesses[slowest]
        if cause == _SAVE:
            # rank 0 prepares the first save of a start for all
            judged, self._has_saved = self._has_saved, self._has_saved or any(taken)
            slow = (slowest, excess) if judged and excess > max(_OF_SAVE, _SHARE * taken[slowest]) else None
        else:
            is_slow = excess > max(_SECONDS, _SHARE * seconds)
            slow = self._stretches[cause].add(slowest if is_slow else None, excess, seconds)
        return None if slow is None else Straggler(slow[0], self._nodes[slow[0]], cause, slow[1])
