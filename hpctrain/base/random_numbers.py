"""Initial values that depend on (seed, name, row) alone, so that every layout of ranks has the same."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

ROWS_PER_DRAW = 64
"""Rows drawn from one generator. A rank that holds some rows draws fewer than this many in excess at each end."""

_LARGE = 2**20  # elements for which threads are worth their start


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any parts; different parts give unrelated seeds."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def fill_normal(tensor: Tensor, std: float, seed: int, name: str, rows: tuple[int, int]) -> None:
    """Fill `tensor`, the rows `rows` of the parameter `name`, with normal numbers of standard deviation `std`.

    Draws in float32 on the CPU, so that device and dtype affect only the rounding; a large tensor on all of torch's threads.
    """
    first, end = rows
    values = tensor.detach() if tensor.dim() else tensor.detach().view(1)
    is_drawn_in_place = values.device.type == "cpu" and values.dtype == torch.float32 and values.is_contiguous()

    def fill(draw: int) -> None:
        generator = torch.Generator().manual_seed(derive_seed(seed, name, draw))
        begin = draw * ROWS_PER_DRAW
        low, high = max(first, begin), min(end, begin + ROWS_PER_DRAW)
        part, shape = values[low - first : high - first], (ROWS_PER_DRAW, *values.shape[1:])
        block = part if is_drawn_in_place and part.shape == shape else torch.empty(shape, dtype=torch.float32)
        torch.randn(shape, generator=generator, out=block)
        numbers = block.numpy()
        np.multiply(numbers, np.float32(std), out=numbers)  # torch would start threads for it in each of these threads
        if block is not part:
            part.copy_(block[low - begin : high - begin])

    draws = range(first // ROWS_PER_DRAW, -(-end // ROWS_PER_DRAW))
    if values.numel() < _LARGE or torch.get_num_threads() == 1:
        for draw in draws:
            fill(draw)
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            list(threads.map(fill, draws))
