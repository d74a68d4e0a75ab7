"""Plans the samples of each micro batch of this data-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from hpctrain.data.order import Order


@dataclass(frozen=True)
class Planned:
    """A micro batch: the indices of its samples, the place of the first sample, and whether its loss counts.

    positions: the samples' positions in the order; they seed what samples draw. Empty in an evaluation, where a sample draws the
    same each time. after: for a step's last micro batch, the position in the sample order at which the next step begins.
    """

    indices: Sequence[int]
    place: int
    counts: bool = True
    after: int | None = None
    positions: Sequence[int] = ()


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

    def training(self, order: Order, samples_seen: int, steps: int) -> Iterator[Planned]:
        """Each micro batch of the next `steps` steps."""
        share = self.global_size // self.ranks
        for step in range(steps):
            begin = samples_seen + step * self.global_size
            for micro in range(self.micro_batches):
                place = self.rank * share + micro * self.micro_size
                after = begin + self.global_size if micro == self.micro_batches - 1 else None
                positions = range(begin + place, begin + place + self.micro_size)
                indices = order.at(positions.start, positions.stop).tolist()
                yield Planned(indices, place, after=after, positions=positions)

    def evaluation(self, samples: int, batches: int | None = None) -> Iterator[Planned]:
        """The first `batches` global batches of `samples` samples (None: all), cut over the ranks; a rank's last micro batch
        may be smaller.

        Every rank gets the same number of micro batches, since a forward may communicate. A rank without samples left
        repeats the first sample, which does not count.
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

    def evaluation_of_stream(self, batches: int | None = None) -> Iterator[Planned]:
        """An evaluation on as many global batches of a stream (None: until it ends, which the plan doesn't know).

        Of each block of ranks x micro_size items every rank takes every ranks-th, so a block that the end cuts short is shared
        out, too.
        """
        block = self.ranks * self.micro_size
        for number in count() if batches is None else range(batches * self.global_size // block):
            first = number * block
            yield Planned(range(first + self.rank, first + block, self.ranks), first)

    def __str__(self) -> str:
        ranks = f"{self.ranks} data-parallel rank{'s' * (self.ranks > 1)}"
        micro_batches = f"{self.micro_batches} micro batch{'es' * (self.micro_batches > 1)}"
        return f"{self.global_size} samples = {ranks} x {micro_batches} x {self.micro_size}"
