"""Scaling of reduced values, and Adasum."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def scale(tensor: Tensor, factor: float, divisor: int = 1) -> None:
    """Multiply in place, then divide. Integers are computed in float64 and truncated towards zero."""
    if factor == 1.0 and divisor == 1:
        return
    if tensor.is_floating_point():
        tensor.mul_(factor / divisor)
    elif factor == 1.0:
        tensor.copy_(torch.div(tensor, divisor, rounding_mode="trunc"))
    else:
        tensor.copy_((tensor.double() * factor / divisor).trunc())


def adasum(tensor: Tensor, rank: int, size: int, exchange: Callable[[Tensor, int], Tensor]) -> Tensor:
    """The adaptive sum of the ranks' tensors (Maleki et al. 2020, "Scaling Distributed Training with Adaptive Summation").

    Two gradients a and b give (1 - ab / 2aa) a + (1 - ab / 2bb) b: their sum if they are orthogonal, their average if they are
    equal. Pairs of ranks combine theirs, then pairs of pairs; `size` is a power of two. exchange: the tensor of a peer.
    Sums are made in float64, in the same order on both ranks of a pair, so that all ranks get the same bits.
    """
    total = tensor.double().flatten()
    distance = 1
    while distance < size:
        other = exchange(total, rank ^ distance)
        first, second = (total, other) if rank & distance == 0 else (other, total)
        product = torch.dot(first, second)
        total = _share(first, product) * first + _share(second, product) * second
        distance *= 2
    return total.to(tensor.dtype).view(tensor.shape)


def _share(tensor: Tensor, product: Tensor) -> Tensor:
    norm = torch.dot(tensor, tensor)
    return torch.where(norm > 0, 1 - product / (2 * norm), torch.ones_like(norm))
