"""Batch normalization over the samples of several processes, on any device."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpctrain.base.torch_private import uncompiled

__all__ = ["SynchronizedBatchNorm"]


class SynchronizedBatchNorm(nn.BatchNorm1d):
    """torch.nn.BatchNorm of any number of dims, with the mean and the variance over all processes, which may have different numbers
    of samples."""

    @property
    @abstractmethod
    def processes(self) -> int:
        """The number of processes that call `forward` together."""

    @abstractmethod
    def gather(self, row: Tensor) -> Tensor:
        """The row of each process, `(processes, ...)`."""

    @abstractmethod
    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes."""

    @uncompiled  # it communicates
    def forward(self, input: Tensor) -> Tensor:
        """input: (batch, channels, ...). Raises ValueError for fewer dims."""
        if input.dim() < 2:
            raise ValueError(f"found an input of {input.dim()} dims, expected (batch, channels, ...)")
        if self.processes == 1 or not (self.training or self.running_mean is None):
            flat = input.flatten(2) if input.dim() > 3 else input  # what BatchNorm1d takes
            return super().forward(flat).reshape(input.shape)
        apply: Callable[..., Any] = _Normalized.apply
        output, mean, variance, count = apply(input, self.weight, self.bias, self.eps, self.gather, self.sum)
        if self.training and self.track_running_stats:
            self._update(mean, variance, count)
        result: Tensor = output
        return result

    def _update(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


class _Normalized(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        gather: Callable[[Tensor], Tensor],
        sum_of: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        exact = tensor if tensor.dtype == torch.float64 else tensor.float()
        over = [dim for dim in range(tensor.dim()) if dim != 1]
        here = tensor.numel() // tensor.shape[1]
        own = exact.new_zeros(3, tensor.shape[1])
        own[2] = here
        if here:
            own[0], own[1] = exact.mean(over), exact.var(over, unbiased=False)
        means, variances, counts = gather(own).unbind(1)
        total = counts.sum(0)
        mean = (means * counts).sum(0) / total
        variance = ((variances + (means - mean) ** 2) * counts).sum(0) / total
        normal = (exact - _row(mean, tensor)) * _row(torch.rsqrt(variance + eps), tensor)
        ctx.save_for_backward(normal, weight, variance, total)
        ctx.over, ctx.eps, ctx.sum_of, ctx.has_bias = over, eps, sum_of, bias is not None
        output = normal if weight is None else normal * _row(weight, tensor)
        output = output if bias is None else output + _row(bias, tensor)
        count = total[0].clone()
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(tensor.dtype), mean, variance, count

    @staticmethod
    @once_differentiable  # what it reads counts as constant
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> Any:
        normal, weight, variance, total = ctx.saved_tensors
        exact = gradient.to(normal.dtype)
        sums = torch.stack([exact.sum(ctx.over), (exact * normal).sum(ctx.over)])
        mean, along = ctx.sum_of(sums.clone()) / total
        scaled = torch.rsqrt(variance + ctx.eps) * (1.0 if weight is None else weight)
        found = (exact - _row(mean, normal) - normal * _row(along, normal)) * _row(scaled, normal)
        return (
            found.to(gradient.dtype),
            None if weight is None else sums[1],
            sums[0] if ctx.has_bias else None,
            None,
            None,
            None,
        )


def _row(values: Tensor, like: Tensor) -> Tensor:
    """(channels,) as (1, channels, 1, ...), to be combined with (batch, channels, ...)."""
    return values.view(1, -1, *([1] * (like.dim() - 2)))
