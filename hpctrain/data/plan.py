"""Which samples make up each micro batch of this data-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.data.order import SampleOrder


@dataclass(frozen=True)
class Planned:
    """A micro batch: the indices of its samples, the place of the first one, and whether its loss counts.

    after: for a step's last micro batch, the position in the order of the samples at which the next step begins.
    """

    indices: Sequence[int]
    place: int
    counts: bool = True
    after: int | None = None


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

    @property
    def samples_per_step(self) -> float:
        return float(self.global_size)

    def training(self, order: SampleOrder, samples_seen: int, steps: int) -> Iterator[Planned]:
        """Each micro batch of the next `steps` steps."""
        share = self.global_size // self.ranks
        for step in range(steps):
            begin = samples_seen + step * self.global_size
            for micro in range(self.micro_batches):
                place = self.rank * share + micro * self.micro_size
                after = begin + self.global_size if micro == self.micro_batches - 1 else None
                yield Planned(order.at(begin + place, begin + place + self.micro_size).tolist(), place, after=after)

    def evaluation(self, samples: int, batches: int | None = None) -> Iterator[Planned]:
        """The first `batches` global batches of `samples` samples (None: all), cut over the ranks; a rank's last micro batch
        may be smaller.

        Every rank gets the same number of micro batches, since a forward may communicate: a rank that has run out
        of samples repeats the first one, which does not count.
        """
        if batches is not None:
            samples = min(samples, batches * self.global_size)
        bounds = np.linspace(0, samples, self.ranks + 1).astype(int)
        begin, end = int(bounds[self.rank]), int(bounds[self.rank + 1])
        most = -(-int(np.diff(bounds).max()) // self.micro_size)
        for first in range(begin, begin + most * self.micro_size, self.micro_size):
            if first < end:
                yield Planned(range(first, min(first + self.micro_size, end)), first)
            else:
                yield Planned(range(1), 0, counts=False)

    def __str__(self) -> str:
        ranks = f"{self.ranks} data-parallel rank{'s' * (self.ranks > 1)}"
        micro_batches = f"{self.micro_batches} micro batch{'es' * (self.micro_batches > 1)}"
        return f"{self.global_size} samples = {ranks} x {micro_batches} x {self.micro_size}"
