"""A checksum of a tensor's bytes, computed where the tensor lies."""

from __future__ import annotations

import torch
from torch import Tensor

from hpctrain.base.devices import is_accelerator

_INTEGERS = {1: torch.uint8, 2: torch.int16}
"""Integers by the bytes of an element. Wider ones are words of 32 bits: of 64 bits, the product would lose the highest ones'
place."""
_ROW = 1 << 14
"""Words that share a table of factors. Temporary copies of them fit into a CPU's cache."""
_ROWS = 64
"""Rows at a time on an accelerator, where each operation costs a launch."""


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """64 bits made of the tensor's bytes, whatever its dtype. Two tensors that differ in one element never have the same ones.

    The sum of each word times an odd number that depends on its place, modulo 2^64: no odd number loses a difference. The order
    of a sum of integers does not matter.
    """
    plain = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    words = plain.reshape(-1).contiguous().view(_INTEGERS.get(plain.element_size(), torch.int32))
    factors = _odd(0, min(len(words), _ROW), words.device)
    even = len(words) // _ROW * _ROW
    sums = [_sum_of(words[even:], factors[: len(words) - even])[None]]
    step = _ROWS if is_accelerator(words.device) else 1
    sums += [_sum_of(rows, factors) for rows in words[:even].view(-1, _ROW).split(step)] if even else []
    of_rows = torch.cat(sums)
    return int(_sum_of(of_rows, _odd(_ROW, len(of_rows), words.device))) & (2**64 - 1)


def _sum_of(words: Tensor, factors: Tensor) -> Tensor:
    """(..., n) and (n,) -> (...)"""
    return (words * factors).sum(-1)


def _odd(first: int, count: int, device: torch.device) -> Tensor:
    """Odd numbers of 64 bits without a pattern, (count,): SplitMix64 (Steele et al., 2014) mixes so."""
    mixed = torch.arange(first, first + count, device=device) * -7046029254386353131  # 2^64 divided by the golden ratio
    return ((mixed ^ (mixed >> 31)) * -4658895280553007687) | 1
