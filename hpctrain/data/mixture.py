"""The order of a mixture: parts of the samples are drawn by shares, which may change at given positions.

Position p belongs to a phase, and in it to a block. The places of a block go to the parts by their shares, and are then shuffled
in runs of 32, so that no rank always gets the same part; each takes the next sample of its part's own order. All of it follows
from p: it is the same on any number of ranks, and a resume needs only the position.

A part of share s gets floor(x s + 1/2) of the first x places; the parts after it share the others in the same way. So the samples
of each part up to the end of any run are as many as its share says, but for one or two.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpctrain.base.random_numbers import derive_seed
from hpctrain.contracts.dataset import Part
from hpctrain.data.order import Indices, mixed, order_of

_BLOCK = 4096  # positions that are computed at once
_RUN = 32  # positions that are shuffled among each other
# shares are multiples of 2^-32
_BITS = 32
_HALF = 1 << (_BITS - 1)


class MixtureOrder:
    """Draws parts by their shares, and each part's samples in an order of its own: each once in an epoch of the part."""

    def __init__(self, parts: Sequence[Part], seed: int, fingerprint: str) -> None:
        """Make an order without a phase, which needs one at least."""
        self._seed, self._fingerprint = seed, fingerprint
        self._begins, self._splits = list[int](), list[list[int]]()
        self._orders = [
            order_of(part.count, part.weights, seed, f"{fingerprint} part {number}")
            for number, part in enumerate(parts)
        ]
        self._offsets = np.cumsum([0, *(part.count for part in parts)])
        self._latest: tuple[tuple[int, int], Indices] | None = None
        # the samples of each part that are drawn before each phase
        self._drawn = [np.zeros(len(parts), np.int64)]

    def add_phase(self, begin: int, shares: Sequence[float]) -> None:
        """Draw by these shares from position `begin` on, 0 in the first phase; before it nothing changes."""
        if self._begins:
            phase = len(self._begins) - 1
            block, rest = divmod(begin - self._begins[phase], _BLOCK)
            owners = self._owners(phase, block)[:rest]
            self._drawn.append(self._before(phase, block) + np.bincount(owners, minlength=len(self._orders)))
        self._begins.append(begin)
        self._splits.append(_splits(shares))

    def at(self, begin: int, end: int) -> Indices:
        """The sample indices of positions `begin` to `end`."""
        indices = [np.empty(0, np.int64)]
        while begin < end:
            phase = bisect_right(self._begins, begin) - 1
            block, place = divmod(begin - self._begins[phase], _BLOCK)
            until = min(end, begin - place + _BLOCK, *self._begins[phase + 1 : phase + 2])
            indices.append(self._samples(phase, block)[place : place + until - begin])
            begin = until
        return np.concatenate(indices)

    def _samples(self, phase: int, block: int) -> Indices:
        """The sample indices of a block, were it whole."""
        latest = self._latest
        if latest is not None and latest[0] == (phase, block):
            return latest[1]
        owners, before = self._owners(phase, block), self._before(phase, block)
        indices = np.empty_like(owners)
        for part, order in enumerate(self._orders):
            mine = np.flatnonzero(owners == part)
            indices[mine] = order.of(np.arange(len(mine)) + before[part]) + self._offsets[part]
        self._latest = (phase, block), indices
        return indices

    def _owners(self, phase: int, block: int) -> Indices:
        """The part that has each place of a block, in the shuffled order."""
        owners = np.empty(_BLOCK, np.int64)
        left = np.arange(_BLOCK)  # places of no part so far, and their numbers among all such places
        numbers = left + block * _BLOCK
        for part, split in enumerate(self._splits[phase]):
            before = _taken(numbers, split)
            is_mine = _taken(numbers + 1, split) > before
            owners[left[is_mine]] = part
            left, numbers = left[~is_mine], (numbers - before)[~is_mine]
        key = np.uint64(derive_seed(self._seed, self._fingerprint, "mixture", phase, block))
        draws = mixed(np.arange(_BLOCK, dtype=np.uint64), key).reshape(-1, _RUN)
        shuffled: Indices = np.take_along_axis(
            owners.reshape(-1, _RUN), np.argsort(draws, axis=1, kind="stable"), axis=1
        )
        return shuffled.reshape(-1)

    def _before(self, phase: int, block: int) -> Indices:
        """The samples of each part that are drawn before a block."""
        length, counts = block * _BLOCK, []
        for split in self._splits[phase]:
            counts.append((length * split + _HALF) >> _BITS)
            length -= counts[-1]
        before: Indices = self._drawn[phase] + np.array(counts, np.int64)
        return before


def _splits(shares: Sequence[float]) -> list[int]:
    """The share of each part in what the parts before it leave, in 2^-32."""
    left = np.cumsum(np.array(shares, np.float64)[::-1])[::-1]
    splits = [round(share / rest * 2**_BITS) if rest else 0 for share, rest in zip(shares, left, strict=True)]
    last = max(number for number, share in enumerate(shares) if share)  # takes what rounding has left
    return [2**_BITS if number == last else split for number, split in enumerate(splits)]


def _taken(places: Indices, split: int) -> Indices:
    """The number of the first `places` places that a part takes: floor(places x split / 2^32 + 1/2), in 64 bits."""
    wide, share = places.astype(np.uint64), np.uint64(split)
    low = wide & np.uint64(2**_BITS - 1)
    whole: np.ndarray[Any, Any] = (wide >> np.uint64(_BITS)) * share + (
        (low * share + np.uint64(_HALF)) >> np.uint64(_BITS)
    )
    return whole.astype(np.int64)
