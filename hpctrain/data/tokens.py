"""Batches by token budget, for samples of different lengths.

A global batch is the next samples of the order that fit the budget. So where it ends is a pure function of the order, the
lengths and where it begins: it is the same on any number of ranks, and a resume needs the position alone. The way in which
the ranks share a batch has no influence on its content.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, takewhile

import numpy as np

from hpctrain.contracts.dataset import Lengths
from hpctrain.data.order import Indices, SampleOrder
from hpctrain.data.plan import Planned

_AHEAD = 256
"""Positions that are looked up at once, at least; more where a batch has more samples."""


def global_batches(
    at: Callable[[int, int], Indices], lengths: Lengths, tokens: int, begin: int, end: int | None = None
) -> Iterator[tuple[int, Indices]]:
    """The global batches from position `begin` on: where the next one begins, and the samples.

    at: the samples of a range of positions. No sample may be longer than `tokens`. At `end` the last one is cut off.
    """
    read, pending = begin, np.empty(0, dtype=np.int64)
    while True:
        fit = int(np.searchsorted(np.cumsum(lengths[pending]), tokens, side="right"))
        if fit < len(pending):
            begin += fit
            yield begin, pending[:fit]
            pending = pending[fit:]
        elif end is None or read < end:
            more = max(fit, min(_AHEAD, len(lengths)))  # each epoch of the order costs a permutation of its own
            if end is not None:
                more = min(more, end - read)
            pending = np.concatenate([pending, at(read, read + more)])
            read += more
        else:
            if len(pending):
                yield end, pending
            return


def share_out(lengths: Lengths, ranks: int, capacity: int, multiple: int) -> list[list[list[int]]]:
    """For each rank its micro batches; a micro batch is a list of places in `lengths`, the longest sample first.

    The longest samples are given out first, each to the rank that has the fewest tokens so far (Graham, "Bounds on
    Multiprocessing Timing Anomalies", 1969): the most loaded rank has at most one sample, the longest of the batch, more than
    the mean. A rank cuts its samples where the next one would not fit `capacity` tokens, padding to `multiple` included.
    """
    loads = [(0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for place in np.argsort(-lengths, kind="stable").tolist():
        load, rank = loads[0]
        shares[rank].append(place)
        heapq.heapreplace(loads, (load + int(lengths[place]), rank))
    return [_cut(share, lengths, capacity, multiple) for share in shares]


def padded(length: int, multiple: int) -> int:
    """`length` with its padding."""
    return -(-length // multiple) * multiple


def _cut(share: list[int], lengths: Lengths, capacity: int, multiple: int) -> list[list[int]]:
    micro_batches = []
    while share:
        rows = capacity // padded(int(lengths[share[0]]), multiple)
        micro_batches.append(share[:rows])
        share = share[rows:]
    return micro_batches


def whole_batches(order: SampleOrder, lengths: Lengths, tokens: int, end: int, begin: int = 0) -> int:
    """How many whole global batches the positions `begin` to `end` of the order make."""
    batches = global_batches(order.at, lengths, tokens, begin)
    return sum(1 for _ in takewhile(lambda batch: batch[0] <= end, batches))


@dataclass(frozen=True)
class TokenPlan:
    """How global batches of `tokens` tokens are cut: into micro batches of `capacity` tokens, padded to `multiple`.

    lengths: of the samples that are planned.
    """

    lengths: Lengths
    tokens: int
    capacity: int
    multiple: int
    rank: int
    ranks: int

    @property
    def micro_batches(self) -> int:
        """Micro batches per step on each rank, at least."""
        return -(-self.tokens // (self.ranks * self.capacity))

    @property
    def samples_per_step(self) -> float:
        """On average, were every global batch full."""
        return float(self.tokens / self.lengths.mean())

    def training(self, order: SampleOrder, samples_seen: int, steps: int) -> Iterator[Planned]:
        """Each micro batch of the next `steps` steps."""
        for after, indices in islice(global_batches(order.at, self.lengths, self.tokens, samples_seen), steps):
            yield from self._mine(indices, after)

    def evaluation(self, samples: int, batches: int | None) -> Iterator[Planned]:
        """Each micro batch of the first `batches` global batches of `samples` samples in their own order (None: all)."""
        for after, indices in islice(global_batches(np.arange, self.lengths, self.tokens, 0, samples), batches):
            yield from self._mine(indices, after)

    def _mine(self, indices: Indices, after: int) -> Iterator[Planned]:
        """This rank's micro batches of a global batch.

        Every rank runs as many as the rank with the most, since a forward may communicate. The others end with micro
        batches that do not count.
        """
        lengths = self.lengths[indices]
        shares = share_out(lengths, self.ranks, self.capacity, self.multiple)
        most = max(map(len, shares))
        mine = shares[self.rank]
        for number in range(most):
            last = after if number == most - 1 else None
            if number < len(mine):
                yield Planned(indices[mine[number]].tolist(), mine[number][0], after=last)
            else:
                yield Planned([int(indices[lengths.argmin()])], 0, counts=False, after=last)

    def __str__(self) -> str:
        return (
            f"up to {self.tokens:,} tokens on {self.ranks} data-parallel ranks, in micro batches of up to {self.capacity:,} "
            "with padding"
        )
