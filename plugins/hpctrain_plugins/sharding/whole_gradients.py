"""Gradients of stage 3 where a program differentiates twice: units stay gathered, and whole gradients are summed once.

fully_shard sums a unit's gradients and frees its parameters where a backward leaves the unit. A gradient that is part of a loss is
computed by a backward of its own, whose operators the loss's backward differentiates: they need the parameters again, and add to
gradients after the backward has left the unit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hpctrain.api import BucketSum, GradientBucket, GradientSums
from hpctrain.toolkit.buckets import trained


class WholeGradients:
    """Whole gradients of one micro batch. `keep` begins it, `take` ends it."""

    def __init__(
        self, units: Sequence[FSDPModule], sums: GradientSums, group: dist.ProcessGroup, reshards: bool
    ) -> None:
        """units: the whole module first. group: the ranks of dp_shard. reshards: whether units are freed after their forward."""
        self._units, self._sums, self._group, self._reshards = units, sums, group, reshards
        self._made: dict[torch.dtype, BucketSum] = {}
        self.kept = False

    def keep(self) -> None:
        """Keep units gathered from now on, and their gradients on this rank."""
        self.kept = True
        for unit in self._units:
            self._set(unit, syncs=False, after_forward=False)

    @torch.no_grad()
    def take(self) -> dict[str, Tensor]:
        """This rank's rows of each gradient, summed over the ranks, by the parameter's name; units are freed again. Collective."""
        root = self._units[0]
        assert isinstance(root, nn.Module)
        for unit in self._units:
            unit.unshard()  # those that this rank did not use
        by_dtype: dict[torch.dtype, dict[str, Tensor]] = {}
        for name, parameter in trained(root):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = None
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            by_dtype.setdefault(local.dtype, {})[name] = local
        found: dict[str, Tensor] = {}
        for gradients in by_dtype.values():
            found |= self._summed(gradients)
        for number, unit in enumerate(self._units):
            unit.reshard()
            self._set(unit, syncs=True, after_forward=self._reshards and number > 0)
        self.kept = False
        return found

    def _summed(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        flat = torch.cat([one.reshape(-1) for one in gradients.values()])
        if flat.dtype not in self._made:
            content = GradientBucket(None, len(flat), flat.dtype, flat.device)
            self._made[flat.dtype] = self._sums.bucket(content, "dp_shard")
        self._made[flat.dtype].all_reduce(flat)()
        parts = torch.split(flat, [one.numel() for one in gradients.values()])
        return {
            name: self._rows(part.view(one.shape)) for (name, one), part in zip(gradients.items(), parts, strict=True)
        }

    def _rows(self, whole: Tensor) -> Tensor:
        """The rows of this rank, as fully_shard cuts them."""
        chunks = torch.chunk(whole, self._group.size())
        return chunks[self._group.rank()] if self._group.rank() < len(chunks) else whole[:0]

    @staticmethod
    def _set(unit: FSDPModule, syncs: bool, after_forward: bool) -> None:
        unit.set_requires_gradient_sync(syncs, recurse=False)
        unit.set_reshard_after_backward(syncs, recurse=False)
        unit.set_reshard_after_forward(after_forward, recurse=False)
