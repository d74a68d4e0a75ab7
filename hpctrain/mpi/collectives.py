"""Collectives that only move data. All tensors here are plain (see buffers) and checked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from hpctrain.mpi.buffers import MAX_COUNT, same_memory
from hpctrain.mpi.channel import Channel

# Up to here, over all ranks, a list is gathered in one MPI call and then copied out. Bytes.
_STAGED = 64 * 1024


def all_gather_single(channel: Channel, output: Tensor, tensor: Tensor) -> None:
    """All ranks' `tensor` one after the other into `output`; it may be this rank's slice of `output`."""
    if channel.size == 1 or output.nbytes > MAX_COUNT:
        all_gather(channel, output.view(-1).tensor_split(channel.size), tensor, even=True)
        return
    in_place = tensor.data_ptr() == output.data_ptr() + channel.rank * tensor.nbytes
    channel.all_gather(output, None if in_place else tensor)


def all_gather(channel: Channel, outputs: Sequence[Tensor], tensor: Tensor, *, even: bool) -> None:
    """All ranks' `tensor` into one output for each. even: all are of one size."""
    if even and channel.size > 1 and tensor.nbytes * channel.size <= _STAGED:
        gathered = channel.scratch(tensor.nbytes * channel.size).view(tensor.dtype)
        channel.all_gather(gathered, tensor)
        if tensor.numel():
            for output, part in zip(outputs, gathered.chunk(channel.size), strict=True):
                output.view(-1).copy_(part)
        return
    own = partial(_copy, outputs[channel.rank], tensor)
    channel.exchange([(r, tensor) for r in channel.others], [(r, outputs[r]) for r in channel.others], meanwhile=own)


def all_to_all(channel: Channel, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """`inputs[r]` to rank r, whose own comes into `outputs[r]`. Outputs and inputs share no memory."""
    own = partial(_copy, outputs[channel.rank], inputs[channel.rank])
    channel.exchange([(r, inputs[r]) for r in channel.others], [(r, outputs[r]) for r in channel.others], meanwhile=own)


def gather(channel: Channel, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> None:
    """All ranks' `tensor` into the root's outputs; others pass none."""
    if channel.rank != root:
        channel.exchange([(root, tensor)], [])
        return
    channel.exchange([], [(rank, output) for rank, output in enumerate(outputs) if rank != root])
    _copy(outputs[root], tensor)


def scatter(channel: Channel, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
    """The root's `inputs[r]` to rank r; others pass none."""
    if channel.rank != root:
        channel.exchange([], [(root, output)])
        return
    channel.exchange([(rank, tensor) for rank, tensor in enumerate(inputs) if rank != root], [])
    _copy(output, inputs[root])


def _copy(output: Tensor, tensor: Tensor) -> None:
    if not same_memory(output, tensor):
        output.view(-1).copy_(tensor.view(-1))
