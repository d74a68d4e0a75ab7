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
    """How a global batch is cut: each rank takes a contiguous part of it, in micro batches.

    epoch: the samples after which batches begin anew; None where epochs follow each other without a seam. drops: whether what then
    fills no batch is left out, else it is a smaller one.
    """

    global_size: int
    micro_size: int
    rank: int
    ranks: int
    epoch: int | None = None
    drops: bool = False

    @property
    def micro_batches(self) -> int:
        """Micro batches per step on this rank (the gradient accumulation)."""
        return self.global_size // (self.ranks * self.micro_size)

    @property
    def samples_per_step(self) -> float:
        """The average over an epoch; samples that are dropped count."""
        return self.global_size if self.epoch is None else self.epoch / self._steps_of(self.epoch)

    def steps_between(self, begin: int, end: int) -> int:
        """The number of global batches from a position of the order to another; one that goes beyond it does not count."""
        if self.epoch is None or end < begin + -begin % self.epoch:
            return max(0, end - begin) // self.global_size
        rest = -begin % self.epoch  # up to the seam, for a run that was resumed with other batches
        epochs, more = divmod(end - begin - rest, self.epoch)
        return self._steps_of(rest) + epochs * self._steps_of(self.epoch) + more // self.global_size

    def _steps_of(self, samples: int) -> int:
        return samples // self.global_size if self.drops else -(-samples // self.global_size)

    def training(self, order: Order, samples_seen: int, steps: int) -> Iterator[Planned]:
        """Each micro batch of the next `steps` steps."""
        after = samples_seen
        for _ in range(steps):
            begin, behind, after = self._batch_from(after)
            mine = self._mine(behind - begin)
            for number, places in enumerate(mine):
                counts = len(places) > 0
                first, end = (begin + places.start, begin + places.stop) if counts else (begin, begin + 1)  # any does
                indices = order(first, end).tolist()
                last = after if number == len(mine) - 1 else None  # a run resumes between steps
                yield Planned(indices, places.start if counts else 0, counts, last, range(first, end))

    def _batch_from(self, begin: int) -> tuple[int, int, int]:
        """The positions at which the next global batch begins and ends, and at which the one after it may begin."""
        end = begin + self.global_size
        if self.epoch is None:
            return begin, end, end
        seam = (begin // self.epoch + 1) * self.epoch
        if not self.drops:
            return begin, min(end, seam), min(end, seam)
        if end > seam:
            begin, end, seam = seam, seam + self.global_size, seam + self.epoch
        return begin, end, end if end + self.global_size <= seam else seam

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
        end = "rest dropped" if self.drops else "last batch smaller"
        last = "" if self.epoch is None else f", an epoch's {end}"
        return f"{self.global_size} samples = {ranks} x {micro_batches} x {self.micro_size}{last}"
