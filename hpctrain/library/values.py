"""Tensors of all ranks, for a program's loop."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.errors import UsageError


def gathered(tensor: Tensor) -> Tensor:
    """The ranks' tensors of one shape (rows, ...), one after the other. Collective."""
    mine = tensor.detach().contiguous()
    mine = mine[None] if mine.dim() == 0 else mine
    everyone = torch.empty(dist.get_world_size() * mine.shape[0], *mine.shape[1:], dtype=mine.dtype, device=mine.device)
    dist.all_gather_single(everyone, mine)
    return everyone


def reduced(tensor: Tensor, reduction: str) -> Tensor:
    """The "sum" or "mean" of the ranks' tensors. Collective. Raises UsageError for another reduction."""
    if reduction not in ("sum", "mean"):
        raise UsageError(f'reduce: found reduction = {reduction!r}, expected "sum" or "mean"')
    found = tensor.detach().clone()
    if reduction == "mean" and not (found.is_floating_point() or found.is_complex()):
        found = found.float()
    dist.all_reduce(found)
    return found / dist.get_world_size() if reduction == "mean" else found
