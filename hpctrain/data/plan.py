"""Which samples make up each micro batch of this data-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.data.order import SampleOrder


@dataclass(frozen=True)
class Planned:
    """A micro batch: the indices of its samples, the place of the first one, and whether its loss counts."""

    indices: Sequence[int]
    place: int
    counts: bool = True


@dataclass(frozen=True)
class BatchPlan:
    """How a global batch is cut: each rank takes a contiguous part of it, in micro batches."""

    global_size: int
    micro_size: int
    rank: int
    ranks: int

    @property
    def micro_batches(self) -> int:
        """Micro batches per step on this rank (the gradient accumulation)."""
        return self.global_size // (self.ranks * self.micro_size)

    def training(self, order: SampleOrder, samples_seen: int, steps: int) -> Iterator[Planned]:
        """Each micro batch of the next `steps` steps."""
        share = self.global_size // self.ranks
        for step in range(steps):
            begin = samples_seen + step * self.global_size
            for micro in range(self.micro_batches):
                place = self.rank * share + micro * self.micro_size
                yield Planned(order.at(begin + place, begin + place + self.micro_size).tolist(), place)

    def evaluation(self, samples: int) -> Iterator[Planned]:
        """The first `samples` samples, cut over the ranks; a rank's last micro batch may be smaller.

        Every rank gets the same number of micro batches, since a forward may communicate: a rank that has run out
        of samples repeats the first one, which does not count.
        """
        bounds = np.linspace(0, samples, self.ranks + 1).astype(int)
        begin, end = int(bounds[self.rank]), int(bounds[self.rank + 1])
        most = -(-int(np.diff(bounds).max()) // self.micro_size)
        for first in range(begin, begin + most * self.micro_size, self.micro_size):
            if first < end:
                yield Planned(range(first, min(first + self.micro_size, end)), first)
            else:
                yield Planned(range(1), 0, counts=False)
