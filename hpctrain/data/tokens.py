"""Batches by token budget, for samples of different lengths.

A global batch has the next samples of the order that fit the budget. So its end is a pure function of the order, the
lengths and its beginning: it is the same on any number of ranks, and a resume needs only the position. How the ranks
share a batch does not affect its content.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile

import numpy as np

from hpctrain.contracts.dataset import Lengths
from hpctrain.data.order import Indices, Order
from hpctrain.data.plan import Planned

# the least number of positions to look up at once; more if a batch has more samples
_AHEAD = 256


def global_batches(
    order: Order, lengths: Lengths, tokens: int, begin: int, end: int | None = None
) -> Iterator[tuple[int, Indices]]:
    """The global batches from position `begin` on, as (position of the next batch, samples).

    No sample may be longer than `tokens`. The last batch is cut at `end`.
    """
    read, pending = begin, np.empty(0, dtype=np.int64)
    while True:
        fit = int(np.searchsorted(np.cumsum(lengths[pending]), tokens, side="right"))
        if fit < len(pending):
            begin += fit
            yield begin, pending[:fit]
            pending = pending[fit:]
        elif end is None or read < end:
            more = max(fit, min(_AHEAD, len(lengths)))  # each epoch of the order costs another permutation
            if end is not None:
                more = min(more, end - read)
            pending = np.concatenate([pending, order(read, read + more)])
            read += more
        else:
            if len(pending):
                yield end, pending
            return


def share_out(lengths: Lengths, ranks: int, capacity: int, multiple: int, packs: bool = False) -> list[list[list[int]]]:
    """Each rank's micro batches; a micro batch is a list of indices into `lengths`, the longest sample first.

    Samples are assigned from the longest on, each to the rank with the fewest tokens so far (Graham, "Bounds on
    Multiprocessing Timing Anomalies", 1969). The most loaded rank then exceeds the mean by at most the longest sample.
    A rank begins a new micro batch when the next sample would exceed `capacity` tokens, padding to `multiple` included; where it
    packs, a sample goes into the first of its micro batches that has room for it.
    """
    loads = [(0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for place in np.argsort(-lengths, kind="stable").tolist():  # stable: each rank computes the same shares
        load, rank = loads[0]
        shares[rank].append(place)
        heapq.heapreplace(loads, (load + int(lengths[place]), rank))
    divide = _pack if packs else _cut
    return [divide(share, lengths, capacity, multiple) for share in shares]


def padded(length: int, multiple: int) -> int:
    """`length` rounded up to a multiple of `multiple`."""
    return -(-length // multiple) * multiple


def _cut(share: list[int], lengths: Lengths, capacity: int, multiple: int) -> list[list[int]]:
    micro_batches = []
    while share:
        rows = capacity // padded(int(lengths[share[0]]), multiple)  # the first is the longest
        micro_batches.append(share[:rows])
        share = share[rows:]
    return micro_batches


def _pack(share: list[int], lengths: Lengths, capacity: int, multiple: int) -> list[list[int]]:
    """First fit decreasing (Johnson, "Near-Optimal Bin Packing Algorithms", 1973)."""
    micro_batches: list[list[int]] = []
    room: list[int] = []
    for place in share:
        size = padded(int(lengths[place]), multiple)
        row = next((number for number, left in enumerate(room) if left >= size), len(room))
        if row == len(room):
            micro_batches.append([])
            room.append(capacity)
        micro_batches[row].append(place)
        room[row] -= size
    return micro_batches


def whole_batches(order: Order, lengths: Lengths, tokens: int, end: int, begin: int = 0) -> int:
    """The number of whole global batches in the positions `begin` to `end` of the order."""
    batches = global_batches(order, lengths, tokens, begin)
    return sum(1 for _ in takewhile(lambda batch: batch[0] <= end, batches))


@dataclass(frozen=True)
class TokenPlan:
    """Cuts global batches of `tokens` tokens into micro batches of `capacity` tokens, padded to `multiple`.

    lengths: those of the planned samples. packs: whether those of a micro batch lie in one row.
    """

    lengths: Lengths
    tokens: int
    capacity: int
    multiple: int
    rank: int
    ranks: int
    packs: bool = False

    @property
    def micro_batches(self) -> int:
        """The least number of micro batches per step on each rank."""
        return -(-self.tokens // (self.ranks * self.capacity))

    @property
    def samples_per_step(self) -> float:
        """The average if every global batch were full."""
        return float(self.tokens / self.lengths.mean())

    def training(self, order: Order, samples_seen: int, steps: int) -> Iterator[Planned]:
        """Each micro batch of the next `steps` steps."""
        for after, indices in islice(global_batches(order, self.lengths, self.tokens, samples_seen), steps):
            yield from self._mine(indices, after, after - len(indices))

    def evaluation(self, samples: int, batches: int | None) -> Iterator[Planned]:
        """Each micro batch of the first `batches` global batches of `samples` samples in their own order (None: all)."""
        for after, indices in islice(global_batches(np.arange, self.lengths, self.tokens, 0, samples), batches):
            yield from self._mine(indices, after)

    def _mine(self, indices: Indices, after: int, begin: int | None = None) -> Iterator[Planned]:
        """This rank's micro batches of a global batch, which begins at position `begin` of the order.

        Every rank runs as many micro batches as the rank with the most, since a forward may communicate. The additional ones
        come last and do not count.
        """
        lengths = self.lengths[indices]
        shares = share_out(lengths, self.ranks, self.capacity, self.multiple, self.packs)
        most = max(map(len, shares))
        mine = shares[self.rank]
        for number in range(most):
            last = after if number == most - 1 else None
            if number < len(mine):
                places = mine[number]
                positions = () if begin is None else [begin + place for place in places]
                yield Planned(indices[places].tolist(), places[0], after=last, positions=positions)
            else:
                yield Planned([int(indices[lengths.argmin()])], 0, counts=False, after=last)  # the cheapest forward

    def __str__(self) -> str:
        return (
            f"up to {self.tokens:,} tokens on {self.ranks} data-parallel ranks, in "
            + ("packed " if self.packs else "")
            + f"micro batches of up to {self.capacity:,} with padding"
        )
