"""Local SGD (Stich, "Local SGD Converges Fast and Communicates Little", 2019): ranks train alone and average periodically."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from hpctrain.api import Field, Options, Piece, Plan, PluginState, Problem, ShardedModel, Sharding, hookimpl, pieces_of

AXIS = "dp_local"


class LocalSGDOptions(Options):
    every: int = Field(default=8, ge=1, description="steps from one average to the next")


class LocalSGD(Sharding):
    """Nothing is sharded; parameters are averaged instead of gradients."""

    name = "local-sgd"
    Options = LocalSGDOptions
    options: LocalSGDOptions
    ranks_diverge = True

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
        self._average([piece.tensor for piece in self._pieces])

    def state(self) -> PluginState:
        """Each rank's own moments: the checkpoint's optimizer state is one rank's."""
        rank, ranks = self._group.rank(), self._group.size()
        moments = {
            f"{piece.name}/{key}": value
            for piece in self._pieces
            for key, value in self._optimizer.state[piece.tensor].items()
            if isinstance(value, torch.Tensor) and value.dim()
        }
        # copies: a restore fills these pieces, and also fills the optimizer's state with one rank's
        kept = {name: value.clone() for name, value in moments.items()}

        def restore(values):
            if values["ranks"] == ranks:
                for name, value in kept.items():
                    moments[name].copy_(value)

        pieces = [
            Piece(name, (ranks, *value.shape), (rank, *(0 for _ in value.shape)), value[None], (AXIS,))
            for name, value in kept.items()
        ]
        return PluginState("local-sgd", pieces, lambda: {"ranks": ranks}, restore)

    @torch.no_grad()
    def _average(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor, group=self._group)
            tensor /= self._group.size()


@hookimpl
def hpctrain_sharding():
    return [LocalSGD]
