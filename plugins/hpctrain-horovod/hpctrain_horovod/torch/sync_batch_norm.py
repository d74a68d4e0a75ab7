"""Batch normalization over the samples of all ranks, on any device."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from hpctrain_horovod.torch.differentiable import apply
from hpctrain_horovod.torch.mpi_ops import Sum, allgather, allreduce, is_initialized, size

_numbers = itertools.count()


class SyncBatchNorm(torch.nn.BatchNorm1d):
    """torch.nn.BatchNorm with the mean and the variance of the global batch; ranks may have different numbers of samples."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Take the arguments of torch.nn.BatchNorm1d."""
        super().__init__(*arguments, **options)
        self._name = f"sync_batch_norm.{next(_numbers)}"

    def forward(self, input: Tensor) -> Tensor:
        """input: (batch, channels, ...). Raises ValueError for fewer dims."""
        if input.dim() < 2:
            raise ValueError(f"found an input of {input.dim()} dims, expected (batch, channels, ...)")
        together = (self.training or self.running_mean is None) and is_initialized() and size() > 1
        if not together:
            flat = input.flatten(2) if input.dim() > 3 else input  # what BatchNorm1d takes
            return super().forward(flat).reshape(input.shape)
        output, mean, variance, count = apply(_Normalized, input, self.weight, self.bias, self.eps, self._name)
        if self.training and self.track_running_stats:
            self._update(mean, variance, int(count))
        result: Tensor = output
        return result

    def _update(self, mean: Tensor, variance: Tensor, count: int) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / max(count - 1, 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


class _Normalized(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, name: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        exact = tensor if tensor.dtype == torch.float64 else tensor.float()
        over = [dim for dim in range(tensor.dim()) if dim != 1]
        here = tensor.numel() // tensor.shape[1]
        own = exact.new_zeros(3, tensor.shape[1])
        own[2] = here
        if here:
            own[0], own[1] = exact.mean(over), exact.var(over, unbiased=False)
        rows = allgather(own.unsqueeze(0), f"{name}.statistics")
        means, variances, counts = rows[:, 0], rows[:, 1], rows[:, 2]
        total = counts.sum(0)
        mean = (means * counts).sum(0) / total
        variance = ((variances + (means - mean) ** 2) * counts).sum(0) / total
        normal = (exact - _row(mean, tensor)) * _row(torch.rsqrt(variance + eps), tensor)
        ctx.save_for_backward(normal, weight, variance, total)
        ctx.over, ctx.eps, ctx.name, ctx.has_bias = over, eps, name, bias is not None
        output = normal if weight is None else normal * _row(weight, tensor)
        output = output if bias is None else output + _row(bias, tensor)
        ctx.mark_non_differentiable(mean, variance, total)
        return output.to(tensor.dtype), mean, variance, total[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> Any:
        normal, weight, variance, total = ctx.saved_tensors
        exact = gradient.to(normal.dtype)
        sums = torch.stack([exact.sum(ctx.over), (exact * normal).sum(ctx.over)])
        mean, along = allreduce(sums, op=Sum, name=f"{ctx.name}.gradients") / total
        scaled = torch.rsqrt(variance + ctx.eps) * (1.0 if weight is None else weight)
        found = (exact - _row(mean, normal) - normal * _row(along, normal)) * _row(scaled, normal)
        return (
            found.to(gradient.dtype),
            None if weight is None else sums[1],
            sums[0] if ctx.has_bias else None,
            None,
            None,
        )


def _row(values: Tensor, like: Tensor) -> Tensor:
    """(channels,) as (1, channels, 1, ...), to be combined with (batch, channels, ...)."""
    return values.view(1, -1, *([1] * (like.dim() - 2)))
