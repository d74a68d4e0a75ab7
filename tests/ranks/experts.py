"""Expert parallelism as a plugin: an axis whose ranks have samples of their own, and experts of their own.

Beside tensor parallelism each expert is cut, too: its matrices are DTensors over both axes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import cross_entropy, gelu

from hpctrain.api import (
    AppliedAxis,
    AxisTraits,
    Batch,
    Field,
    MetaModel,
    ModelSpec,
    Options,
    Parallelism,
    fill_normal,
    hookimpl,
    joint_mesh,
)

EXPERTS = 4


class Gather(torch.autograd.Function):
    """Everyone's rows, (rows, ...) -> (ranks x rows, ...)."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather(mine, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return scatter(gradient, ctx.group), None


class Scatter(torch.autograd.Function):
    """This rank's rows of the sum, (ranks x rows, ...) -> (rows, ...)."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return scatter(whole, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gather(gradient, ctx.group), None


class Summed(torch.autograd.Function):
    """The sum over the ranks of parts that each computes from the same input."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        return summed(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Shared(torch.autograd.Function):
    """An input of parts: each rank's gradient is a part of the whole one."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, ctx.group), None


def summed(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = part.clone()
    dist.all_reduce(whole, group=group)
    return whole


def gather(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = mine.new_empty((group.size() * len(mine), *mine.shape[1:]))
    dist.all_gather_single(whole, mine.contiguous(), group=group)
    return whole


def scatter(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    mine = whole.new_empty((len(whole) // group.size(), *whole.shape[1:]))
    dist.reduce_scatter_single(mine, whole.contiguous(), group=group)
    return mine


class Experts(nn.Module):
    """The mean of all experts, weighted by a gate."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(size, EXPERTS)
        self.up, self.down = (nn.Parameter(torch.empty(EXPERTS, size, size)) for _ in range(2))
        self.group: dist.ProcessGroup | None = None
        self.width_group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x: (rows, size) -> the same"""
        weights = self.gate(x).softmax(-1)
        up, down = (one.to_local() if isinstance(one, DTensor) else one for one in (self.up, self.down))
        if self.group is None:
            return self._mix(x, weights, up, down)
        first = self.group.rank() * len(up)
        rows, weights = Gather.apply(x, self.group), Gather.apply(weights, self.group)  # type: ignore[no-untyped-call]
        weights = weights[:, first : first + len(up)]
        if self.width_group is not None:
            rows, weights = (Shared.apply(one, self.width_group) for one in (rows, weights))  # type: ignore[no-untyped-call]
        mixed = self._mix(rows, weights, up, down)
        if self.width_group is not None:
            mixed = Summed.apply(mixed, self.width_group)  # type: ignore[no-untyped-call]
        return Scatter.apply(mixed, self.group)  # type: ignore[no-any-return, no-untyped-call]

    @staticmethod
    def _mix(x: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
        hidden = gelu(torch.einsum("rs,esh->reh", x, up))
        return torch.einsum("reh,ehs,re->rs", hidden, down, weights)


class Net(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.embedding, self.experts, self.head = nn.Embedding(7, size), Experts(size), nn.Linear(size, 7)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: (rows, 3) -> (rows, 7)"""
        x = self.embedding(ids).mean(1)
        return self.head(x + self.experts(x))  # type: ignore[no-any-return]


class MixtureOptions(Options):
    size: int = Field(default=6, ge=1, description="width of the experts")


class Mixture(MetaModel):
    """See Net."""

    name = "mixture"
    Options = MixtureOptions
    options: MixtureOptions
    counts = "samples"

    def build(self) -> nn.Module:
        return Net(self.options.size)

    def initialize(self, name: str, tensor: Tensor, rows: tuple[int, int], seed: int) -> None:
        fill_normal(tensor, 0.5, seed, name, rows)

    def forward(self, module: nn.Module, batch: Batch) -> Any:
        return module(batch[0])

    def count(self, batch: Batch) -> int:
        return len(batch[1])

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        return cross_entropy(outputs, batch[1], reduction="sum")


class Expert(Parallelism):
    """Shares out rows and experts."""

    name = "expert"
    traits = AxisTraits("ep", 35, "parts of samples", has_own_parameters=True)

    def apply(self, module: nn.Module, spec: ModelSpec, mesh: DeviceMesh) -> AppliedAxis:
        both = joint_mesh(mesh, "tp")
        for one in module.modules():
            if isinstance(one, Experts):
                one.group = mesh.get_group()
                one.width_group = both.get_group("tp") if both.ndim > 1 else None
                for name, width in (("up", 2), ("down", 1)):
                    mine, cuts = getattr(one, name), (0, width)[: both.ndim]
                    for axis, dim in enumerate(cuts):
                        mine = mine.chunk(both.size(axis), dim)[both.get_local_rank(axis)]
                    placements = [Shard(dim) for dim in cuts]
                    setattr(one, name, nn.Parameter(DTensor.from_local(mine, both, placements, run_check=False)))
        return AppliedExpert(module, mesh)


class AppliedExpert(AppliedAxis):
    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__(module)
        self._rank, self._size = mesh.get_local_rank(), mesh.size()

    def split_batch(self, batch: Batch) -> Batch:
        return [one[self._rank :: self._size] for one in batch]


@hookimpl
def hpctrain_model() -> list[type[ModelSpec]]:
    return [Mixture]


@hookimpl
def hpctrain_parallelism() -> list[type[Parallelism]]:
    return [Expert]
