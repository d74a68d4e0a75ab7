"""Local SGD (Stich, "Local SGD Converges Fast and Communicates Little", 2019): ranks train alone and average now and then."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from hpctrain.api import Field, Options, Piece, Plan, Problem, ShardedModel, Sharding, hookimpl, pieces_of

AXIS = "dp_local"


class LocalSGDOptions(Options):
    every: int = Field(default=8, ge=1, description="steps from one average to the next")


class LocalSGD(Sharding):
    """Every rank has everything; parameters are averaged, not gradients."""

    name = "local-sgd"
    Options = LocalSGDOptions
    options: LocalSGDOptions

    def axes(self, ranks, replicate):
        return {AXIS: ranks}

    def problems(self, plan: Plan) -> list[Problem]:
        cut = [name for name, axis in plan.parallelism.items() if axis.traits.ranks_have != "parts of samples"]
        return [Problem(f"it averages whole models; leave out {', '.join(cut)}", "parallelism")] if cut else []

    def shard(self, module, spec, mesh, sums):
        return LocalSGDModel(module, mesh.get_group(), self.options.every)


class LocalSGDModel(ShardedModel):
    def __init__(self, module, group, every):
        super().__init__(module)
        self._group, self._every = group, every

    def materialized(self) -> None:
        named = [(name, one) for name, one in self.module.named_parameters() if one.requires_grad]
        whole = [piece for name, one in named for piece in pieces_of(self.module, name, one)]
        self._pieces = [replace(piece, axes=(AXIS,)) for piece in whole]  # between averages ranks hold different values
        self._fresh = True

    def begin(self, last: bool, interleaved: bool = False) -> None:
        if self._fresh:
            for piece in self._pieces:
                piece.tensor.grad = None
        self._fresh = False

    def synchronize(self) -> None:
        self._fresh = True
        for piece in self._pieces:
            if piece.tensor.grad is None:
                piece.tensor.grad = torch.zeros_like(piece.tensor)
            piece.tensor.grad *= (
                self._group.size()
            )  # the mean over this rank's samples, not its part of all ranks' mean

    def pieces(self) -> list[Piece]:
        return self._pieces

    def optimizer(self, groups, build):
        self._optimizer = build(groups)
        return self._optimizer

    def stepped(self, step: int) -> None:
        if step % self._every == 0:
            self._average([piece.tensor for piece in self._pieces])

    def consolidate(self) -> None:
        state = [value for one in self._optimizer.state.values() for value in one.values()]
        moments = [value for value in state if isinstance(value, torch.Tensor) and value.dim()]
        self._average([*(piece.tensor for piece in self._pieces), *moments])

    @torch.no_grad()
    def _average(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor, group=self._group)
            tensor /= self._group.size()


@hookimpl
def hpctrain_sharding():
    return [LocalSGD]
