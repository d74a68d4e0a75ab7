"""The order of the samples: a pure function of (seed, fingerprint, position), whatever the number of ranks.

Without weights, position p belongs to epoch p // n; the epoch's permutation of the n samples gives the sample. So a
remainder that does not fill a global batch moves into the next epoch, and a resume needs only the position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from hpctrain.base.random_numbers import derive_seed
from hpctrain.contracts.dataset import Weights

_ROUNDS = 6  # of the Feistel network; four suffice for a random look (Luby and Rackoff, 1988)
# positions that take as long as a single one, which is 0.3 ms
_AHEAD = 1024
Indices = np.ndarray[Any, np.dtype[np.int64]]


Order: TypeAlias = Callable[[int, int], Indices]
"""Gives the sample indices of the positions from one up to another in the endless sequence of samples."""


class SampleOrder:
    """Each sample once in an epoch.

    The permutation is a Feistel network over the smallest even number of bits that holds n, applied until the result is
    below n (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). It needs no memory.
    """

    def __init__(self, samples: int, seed: int, fingerprint: str) -> None:
        self._samples = samples
        self._seed = (seed, fingerprint)
        self._first, self._ahead = 0, np.empty(0, dtype=np.int64)
        self._half = max(1, ((samples - 1).bit_length() + 1) // 2)  # bits of each half

    def at(self, begin: int, end: int) -> Indices:
        """The sample indices of positions `begin` to `end`; some more are computed ahead."""
        if begin < self._first or end > self._first + len(self._ahead):
            self._first, self._ahead = begin, self.of(np.arange(begin, max(end, begin + _AHEAD), dtype=np.int64))
        return self._ahead[begin - self._first : end - self._first]

    def of(self, positions: Indices) -> Indices:
        """The sample indices of any positions."""
        indices = np.empty_like(positions)
        for epoch in np.unique(positions // self._samples).tolist():
            inside = positions // self._samples == epoch
            indices[inside] = self._permute(positions[inside] - epoch * self._samples, epoch)
        return indices

    def _permute(self, values: Indices, epoch: int) -> Indices:
        keys = [np.uint64(derive_seed(*self._seed, epoch, r)) for r in range(_ROUNDS)]
        result = self._feistel(values.astype(np.uint64), keys)
        while (outside := result >= self._samples).any():  # at most three of four values
            result[outside] = self._feistel(result[outside], keys)
        permuted: Indices = result.astype(np.int64)
        return permuted

    def _feistel(self, values: np.ndarray[Any, np.dtype[np.uint64]], keys: list[np.uint64]) -> Any:
        mask = np.uint64((1 << self._half) - 1)
        left, right = values >> np.uint64(self._half), values & mask
        for key in keys:
            left, right = right, left ^ (mixed(right, key) & mask)
        return (left << np.uint64(self._half)) | right


class WeightedOrder:
    """Draws samples with replacement, in proportion to their weights.

    Position p draws the p-th number of a random row that belongs to the seed (splitmix64), so the order needs no state. The
    sums of the weights take 8 bytes per sample.
    """

    def __init__(self, weights: Weights, seed: int, fingerprint: str) -> None:
        self._sums = np.cumsum(weights)
        self._key = np.uint64(derive_seed(seed, fingerprint, "weights"))

    def at(self, begin: int, end: int) -> Indices:
        return self.of(np.arange(begin, end, dtype=np.int64))

    def of(self, positions: Indices) -> Indices:
        """The sample indices of any positions."""
        drawn = mixed(positions.astype(np.uint64), self._key) >> np.uint64(11)  # 53 bits, which float64 holds
        # the right side: a sample of weight 0 has the sum of its predecessor and is never found
        share = drawn.astype(np.float64) * 2.0**-53
        indices: Indices = np.searchsorted(self._sums, share * self._sums[-1], side="right").astype(np.int64)
        return indices


def order_of(samples: int, weights: Weights | None, seed: int, fingerprint: str) -> SampleOrder | WeightedOrder:
    """Each sample once in an epoch, or as often as the weights say."""
    return SampleOrder(samples, seed, fingerprint) if weights is None else WeightedOrder(weights, seed, fingerprint)


def mixed(values: Any, key: np.uint64) -> Any:
    """A keyed 64-bit mixer: splitmix64's finalizer (Steele, Lea and Flood, 2014)."""
    with np.errstate(over="ignore"):  # the arithmetic is modulo 2^64
        z = values * np.uint64(0x9E3779B97F4A7C15) + key
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
