"""Initial values that depend on (seed, name, row) alone, so that every layout of ranks starts with the same numbers."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

ROWS_PER_DRAW = 64
"""Rows drawn from one generator: a rank that holds some rows of a parameter draws at most this many too many."""


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any parts; different parts give unrelated seeds."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def fill_normal(tensor: Tensor, std: float, seed: int, name: str, rows: tuple[int, int]) -> None:
    """Fill `tensor`, rows `rows` of the parameter `name`, with normal numbers of standard deviation `std`.

    Drawn in float32 on the CPU, so that device and dtype change nothing but the rounding.
    """
    first, end = rows
    values = tensor if tensor.dim() else tensor.view(1)
    for draw in range(first // ROWS_PER_DRAW, -(-end // ROWS_PER_DRAW)):
        generator = torch.Generator().manual_seed(derive_seed(seed, name, draw))
        block = torch.randn((ROWS_PER_DRAW, *values.shape[1:]), generator=generator) * std
        begin = draw * ROWS_PER_DRAW
        low, high = max(first, begin), min(end, begin + ROWS_PER_DRAW)
        values[low - first : high - first].copy_(block[low - begin : high - begin])
