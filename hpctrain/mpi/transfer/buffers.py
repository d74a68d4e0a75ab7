"""Tensors as MPI sees them: ready, on the CPU, bytes at an address. MPI moves the bytes, torch does the arithmetic."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hpctrain.base.torch_groups import AsyncCollectiveTensor
from hpctrain.mpi.library import MPI

# MPI before version 4 counts in 32-bit integers (Open MPI 5 still does).
MAX_COUNT = 2**31 - 1
_UNIT = 2**30  # bytes


def ready(tensor: Tensor) -> Tensor:
    """The plain CPU tensor behind `tensor`; waits if it is the output of a running asynchronous collective."""
    if isinstance(tensor, AsyncCollectiveTensor):
        # Its own data pointer is null; wait() returns the tensor with the values.
        tensor = tensor.wait()
    if not tensor.is_cpu:
        raise ValueError(
            f"found a tensor on {tensor.device}, expected one on the CPU: the mpi4py backend moves CPU memory; "
            "use a group with the nccl backend for GPU tensors, or tensor.cpu()"
        )
    # Communication is not part of the autograd graph, and torch refuses in-place arithmetic on a tensor of the graph.
    return tensor.detach() if tensor.requires_grad else tensor


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's bytes in memory are its values in logical order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def plain(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy whose bytes are its values in logical order."""
    return tensor if is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous()


def plain_like(tensor: Tensor) -> Tensor:
    """The tensor itself if bytes can be received straight into it, else a temporary of its shape to copy from."""
    return tensor if is_plain(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype)


def flattened(tensor: Tensor) -> Tensor:
    """A plain tensor with one dim; the tensor itself if it has one dim, since a view would slow down a small message."""
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two plain tensors share memory. MPI forbids it between the buffers of one call."""
    start, other_start = one.data_ptr(), other.data_ptr()
    return start < other_start + other.nbytes and other_start < start + one.nbytes


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two plain tensors are the same bytes in memory."""
    return one.data_ptr() == other.data_ptr() and one.nbytes == other.nbytes


def message(tensor: Tensor) -> Any:
    """A plain tensor's bytes as an MPI message of any size."""
    nbytes = tensor.nbytes
    memory = MPI.buffer.fromaddress(tensor.data_ptr(), nbytes)
    if nbytes <= MAX_COUNT:
        return [memory, nbytes, MPI.BYTE]
    return [memory, 1, _large_type(nbytes)]


@lru_cache(maxsize=64)
def _large_type(nbytes: int) -> MPI.Datatype:
    """A type of one element that spans `nbytes`: whole units, then the rest."""
    units, rest = divmod(nbytes, _UNIT)
    unit = MPI.BYTE.Create_contiguous(_UNIT)
    whole = unit.Create_contiguous(units)
    spanning = MPI.Datatype.Create_struct([1, rest], [0, units * _UNIT], [whole, MPI.BYTE]).Commit()
    unit.Free()
    whole.Free()
    return spanning
