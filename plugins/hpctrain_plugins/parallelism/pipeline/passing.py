"""Passes a tensor of unknown shape to another pipeline stage. Evaluation needs it, since its last batch may be smaller."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MOST_DIMS = 6


def send(tensor: Tensor, rank: int, group: dist.ProcessGroup) -> None:
    """Send a floating-point tensor of at most MOST_DIMS dims to a rank of the group."""
    head = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    padded = torch.tensor(head + [0] * (MOST_DIMS + 2 - len(head)), device=tensor.device)
    dist.send(padded, group_dst=rank, group=group)
    dist.send(tensor.contiguous(), group_dst=rank, group=group)


def receive(rank: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Receive a tensor from a rank of the group."""
    head = torch.zeros(MOST_DIMS + 2, dtype=torch.int64, device=device)
    dist.recv(head, group_src=rank, group=group)
    dtype, dims, *shape = head.tolist()
    tensor = torch.empty(shape[:dims], dtype=_DTYPES[dtype], device=device)
    dist.recv(tensor, group_src=rank, group=group)
    return tensor
