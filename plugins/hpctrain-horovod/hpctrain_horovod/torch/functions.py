"""Starts all ranks from the same values, and exchanges Python objects.

Objects travel as pickles, between the processes of one job.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpctrain_horovod.common.process_sets import ProcessSet, global_process_set
from hpctrain_horovod.engine import runtime
from hpctrain_horovod.torch.gradients import zeros_of
from hpctrain_horovod.torch.mpi_ops import allgather, broadcast_, broadcast_async_, synchronize


def broadcast_parameters(params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int) -> None:
    """Give all ranks the root's values of a state_dict or of a list of named parameters, in place.

    Raises ValueError for a generator: it would be used up by the first look at it.
    """
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, list):
        named = [pair if isinstance(pair, tuple) else (str(place), pair) for place, pair in enumerate(params)]
    else:
        raise ValueError(
            f"found parameters of {type(params).__name__}, expected model.state_dict() or list(model.named_parameters())"
        )
    sent = [(name, value.detach()) for name, value in named if isinstance(value, Tensor)]
    moving = [(tensor, _movable(tensor)) for _, tensor in sent]
    handles = [
        broadcast_async_(buffer, root_rank, f"parameters.{name}")
        for (name, _), (_, buffer) in zip(sent, moving, strict=True)
    ]
    for handle, (tensor, buffer) in zip(handles, moving, strict=True):
        synchronize(handle)
        if buffer.data_ptr() != tensor.data_ptr():
            tensor.copy_(buffer.view(tensor.dtype) if tensor.dtype == torch.bool else buffer)


def _movable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy, as a broadcast takes it."""
    contiguous = tensor.contiguous()
    return contiguous.view(torch.uint8) if tensor.dtype == torch.bool else contiguous


@dataclass(frozen=True)
class _Shape:
    """A tensor's place in an optimizer's state while its values travel."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give all ranks the root's state and options of an optimizer. A rank that has made no step yet gets the state, too.

    Before the first step, gradients that are None become zeros, as in Horovod: scripts read them. SparseAdam gets sparse ones.

    Raises ValueError for LBFGS, whose state holds functions' histories of its own.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("found an LBFGS optimizer, whose state cannot be broadcast; every rank has to keep its own")
    state = optimizer.state_dict()
    if not state["state"]:
        sparse_dims = 1 if isinstance(optimizer, torch.optim.SparseAdam) else None
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = zeros_of(parameter, sparse_dims)
    is_root = runtime.known().world.rank == root_rank
    tensors: list[Tensor] = []

    def noted(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensors.append(value)
        return _Shape(tuple(value.shape), value.dtype)

    outline = broadcast_object(_mapped(state, noted) if is_root else None, root_rank, "optimizer_state")
    if not is_root:
        tensors.clear()

        def made(value: Any) -> Any:
            if not isinstance(value, _Shape):
                return value
            tensors.append(torch.empty(value.shape, dtype=value.dtype))
            return tensors[-1]

        state = _mapped(outline, made)
    named = [(f"optimizer.{place}", tensor) for place, tensor in enumerate(tensors)]
    moved = [(name, tensor.cpu()) for name, tensor in named]
    broadcast_parameters(moved, root_rank)
    if not is_root:
        optimizer.load_state_dict(state)


def _mapped(value: Any, change: Any) -> Any:
    """The same nest of dicts, lists and tuples, with each leaf changed."""
    if isinstance(value, dict):
        return {key: _mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(inner, change) for inner in value)
    return change(value)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's object, on all ranks."""
    name = name or "broadcast_object"
    is_root = runtime.known().world.rank == root_rank
    content = bytearray(pickle.dumps(obj)) if is_root else bytearray()
    length = broadcast_(torch.tensor([len(content)]), root_rank, f"{name}.size", process_set)
    buffer = torch.frombuffer(content, dtype=torch.uint8) if is_root else torch.empty(int(length), dtype=torch.uint8)
    broadcast_(buffer, root_rank, f"{name}.content", process_set)
    return obj if is_root else pickle.loads(buffer.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Every rank's object in rank order, on all ranks."""
    name = name or "allgather_object"
    content = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    lengths = allgather(torch.tensor([content.numel()]), f"{name}.sizes", process_set).tolist()
    everything = allgather(content, f"{name}.content", process_set)
    return [pickle.loads(part.numpy().tobytes()) for part in everything.split(lengths)]
