"""Plans the samples of each micro batch of this data-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

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
        """Samples of a global batch."""
        return self.global_size

    def training(self, order: Order, samples_seen: int, steps: int) -> Iterator[Planned]:
        """Each micro batch of the next `steps` steps."""
        mine = self._mine(self.global_size)
        for step in range(steps):
            begin = samples_seen + step * self.global_size
            for number, places in enumerate(mine):
                positions = range(begin + places.start, begin + places.stop)
                indices = order.at(positions.start, positions.stop).tolist()
                last = begin + self.global_size if number == len(mine) - 1 else None
                yield Planned(indices, places.start, after=last, positions=positions)

    def _mine(self, samples: int) -> list[range]:
        """This rank's micro batches of so many samples, as many as every rank has, since a forward may communicate; empty ones
        where it has none left."""
        begin, end = (samples * place // self.ranks for place in (self.rank, self.rank + 1))
        most = -(-samples // (self.ranks * self.micro_size))
        firsts = range(begin, begin + most * self.micro_size, self.micro_size)
        return [range(first, max(first, min(first + self.micro_size, end))) for first in firsts]

    def evaluation(self, samples: int, batches: int | None = None) -> Iterator[Planned]:
        """The first `batches` global batches of `samples` samples (None: all), cut over the ranks; a rank's last micro batch
        may be smaller.

        Every rank gets the same number of micro batches, since a forward may communicate. A rank without samples left
        repeats the first sample, which does not count.
        """
        if batches is not None:
            samples = min(samples, batches * self.global_size)
        for places in self._mine(samples):
            yield Planned(places, places.start) if len(places) else Planned(range(1), 0, counts=False)

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
