"""The operations as functions that autograd differentiates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hpctrain_horovod.common.process_sets import ProcessSet
from hpctrain_horovod.torch.operations import (
    Average,
    Scales,
    Sum,
    alltoall_async,
    broadcast_into_async,
    gather_async,
    reduce_async,
    scatter_async,
    synchronize,
)


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """The function's outputs."""
    return function.apply(*arguments)


class Reduced(torch.autograd.Function):
    """Allreduces; the gradient is reduced in the same way."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: int, scales: Scales, process_set: ProcessSet, grouped: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.arguments = op, scales, process_set, grouped
        return reduced(tensors, name, op, scales, process_set, grouped)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        op, scales, process_set, grouped = ctx.arguments
        found = reduced([gradient.contiguous() for gradient in gradients], None, op, scales, process_set, grouped)
        return None, None, None, None, None, *found


def reduced(
    tensors: Sequence[Tensor], name: str | None, op: int, scales: Scales, process_set: ProcessSet, grouped: bool
) -> tuple[Tensor, ...]:
    """New tensors, reduced over the ranks."""
    outputs = [torch.empty_like(tensor) for tensor in tensors]
    handle = reduce_async(tensors, outputs, name, op, scales, process_set, tuple, grouped=grouped, waits=True)
    return tuple(synchronize(handle))


class Gathered(torch.autograd.Function):
    """Allgathers; the gradient is averaged, and each rank takes that of its own rows."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, grouped: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.arguments = process_set, [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        handle = gather_async(tensors, name, process_set, tuple, grouped=grouped, waits=True)
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        process_set, rows = ctx.arguments
        gradients = reduced(
            [gradient.contiguous() for gradient in gradients], None, Average, Scales(1.0, 1.0), process_set, True
        )
        everyones = synchronize(gather_async([torch.tensor([rows])], None, process_set, lambda found: found[0]))
        rank = process_set.rank()
        before = everyones[:rank].sum(dim=0).tolist()
        mine = [gradient[begin : begin + count] for gradient, begin, count in zip(gradients, before, rows, strict=True)]
        return None, None, None, *mine


class Broadcast(torch.autograd.Function):
    """A broadcast; the gradient is averaged at the root, and zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.arguments = root_rank, process_set
        output = torch.empty_like(tensor)
        found: Tensor = synchronize(broadcast_into_async(tensor, output, root_rank, name, process_set, waits=True))
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        root_rank, process_set = ctx.arguments
        [found] = reduced([gradient.contiguous()], None, Average, Scales(1.0, 1.0), process_set, False)
        if process_set.ranks[process_set.rank()] != root_rank:
            found.zero_()
        return found, None, None, None


class Exchanged(torch.autograd.Function):
    """An alltoall; the gradient goes back to where its rows came from."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set, waits=True))
        ctx.arguments = received, process_set
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:
        received, process_set = ctx.arguments
        found, _ = synchronize(alltoall_async(gradient.contiguous(), received, None, process_set, waits=True))
        return found, None, None, None


class Scattered(torch.autograd.Function):
    """Reducescatters; the gradients of all ranks are gathered, and those of sums multiplied by the number of ranks."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: int, scales: Scales, process_set: ProcessSet, grouped: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.arguments = op, scales, process_set, grouped
        handle = scatter_async(tensors, name, op, scales, process_set, tuple, grouped=grouped, waits=True)
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        op, scales, process_set, grouped = ctx.arguments
        factor = scales.prescale * scales.postscale
        if op == Sum:
            factor *= process_set.size()
        scaled = [(gradient * factor).contiguous() for gradient in gradients]
        found = synchronize(gather_async(scaled, None, process_set, tuple, grouped=grouped, waits=True))
        return None, None, None, None, None, *found
