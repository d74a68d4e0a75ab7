"""The sum of sparse COO tensors over all ranks. Ranks may have different numbers of entries."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from hpctrain.mpi.collectives.arithmetic import kind_of
from hpctrain.mpi.transfer.channel import Channel


def check(tensor: Tensor, op: ReduceOp | ReduceOp.RedOpType) -> None:
    """Raises ValueError if no sparse reduction is defined for `tensor` and `op`."""
    if tensor.layout != torch.sparse_coo:
        raise ValueError(f"found a tensor of layout {tensor.layout}, expected a dense or a sparse COO tensor")
    if kind_of(op) not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ValueError(f"found {kind_of(op).name} of a sparse tensor, expected SUM or AVG")


def all_reduce(channel: Channel, tensor: Tensor, op: ReduceOp | ReduceOp.RedOpType) -> None:
    """Replace `tensor` by the coalesced sum of all ranks' tensors, added in rank order."""
    with torch.inference_mode(tensor.is_inference()):  # the new indices and values must be of the same kind
        _all_reduce(channel, tensor, op)


def _all_reduce(channel: Channel, tensor: Tensor, op: ReduceOp | ReduceOp.RedOpType) -> None:
    own = tensor.coalesce()
    counts = torch.empty(channel.size, dtype=torch.int64)
    channel.all_gather(counts, torch.tensor([len(own.values())]))
    indices = _exchange(channel, own.indices().contiguous(), [(tensor.sparse_dim(), int(c)) for c in counts])
    dense_shape = own.values().shape[1:]
    values = _exchange(channel, own.values().contiguous(), [(int(c), *dense_shape) for c in counts])
    total = torch.sparse_coo_tensor(indices[0], values[0], tensor.shape, is_coalesced=True)
    for index, value in zip(indices[1:], values[1:], strict=True):
        total = total + torch.sparse_coo_tensor(index, value, tensor.shape, is_coalesced=True)
    total = total.coalesce()
    tensor.copy_(total / channel.size if kind_of(op) == ReduceOp.AVG else total)


def _exchange(channel: Channel, own: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    parts = [torch.empty(shape, dtype=own.dtype) for shape in shapes]
    parts[channel.rank] = own
    channel.exchange([(r, own) for r in channel.others], [(r, parts[r]) for r in channel.others])
    return parts
