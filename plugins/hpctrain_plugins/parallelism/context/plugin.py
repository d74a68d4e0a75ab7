"""The plugin `context`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.api import (
    AppliedAxis,
    AxisTraits,
    Batch,
    ContextParallelModel,
    DistributedAttentionModel,
    Documents,
    Field,
    ModelSpec,
    Options,
    Parallelism,
    Plan,
    Problem,
    UsageError,
    hookimpl,
)
from hpctrain_plugins.parallelism.context import ring, ulysses


class ContextOptions(Options):
    method: Literal["ring", "ulysses"] | None = Field(
        default=None,
        description="ring passes keys and values from rank to rank; ulysses exchanges tokens for heads, whose number the ranks "
        "must divide; default: the model's own where it has one, else ring",
    )


class ContextParallel(Parallelism):
    """Cuts sequences over the ranks of the axis cp."""

    name = "context"
    Options = ContextOptions
    options: ContextOptions

    @property
    def traits(self) -> AxisTraits:
        shares_heads = self.options.method == "ulysses"
        return AxisTraits("cp", 40, "parts of samples", shares_heads=shares_heads, cuts_documents=True)

    def sequence_multiple(self, size: int, spec: ModelSpec) -> int:
        return size * (2 if self._method(spec) == "ring" else 1)

    def _method(self, spec: ModelSpec) -> str:
        return self.options.method or ("its own" if isinstance(spec, DistributedAttentionModel) else "ring")

    def problems(self, plan: Plan) -> list[Problem]:
        spec, size, method = plan.model, plan.sizes[self.name], self._method(plan.model)
        problems = []
        if not isinstance(spec, ContextParallelModel):
            why = f"the model {spec.name!r} does not say which of its inputs are sequences (ContextParallelModel)"
            problems.append(Problem(why))
        elif method != "its own" and isinstance(spec, DistributedAttentionModel):
            why = f"the model {spec.name!r} computes its attention over ranks by itself; leave method = {method!r} out"
            problems.append(Problem(why))
        elif method == "ulysses" and spec.attention_heads % size:
            heads = f"the model has {spec.attention_heads} attention heads, which {size} ranks do not divide"
            problems.append(Problem(f'{heads}; use method = "ring"'))
        if plan.compiles and plan.activation_checkpointing.is_compiled and (method != "ulysses" or plan.packs):
            other = 'method = "ulysses" without packing, or ' if method != "its own" else ""
            why = (
                "context: attention that communicates and packed rows are not compiled, and this activation checkpointing needs "
                f'each block in one piece; use {other}[activation_checkpointing] mode = "full"'
            )
            problems.append(Problem(why, "compile.enabled"))
        return problems

    def apply(self, module: nn.Module, spec: ModelSpec, mesh: DeviceMesh) -> AppliedContextParallel:
        assert isinstance(spec, ContextParallelModel)  # see problems
        method, group = self._method(spec), mesh.get_group()
        attentions: list[Any] = spec.attentions(module)
        if not attentions:
            raise UsageError(f"[parallelism] context: the model {spec.name!r} names no attention modules")
        for attention in attentions:
            if method == "its own":
                attention.distribute(group)
            else:
                attend = ring.ring_attention if method == "ring" else ulysses.ulysses_attention
                attention.attend = partial(attend, group=group)
        return AppliedContextParallel(
            module, method, spec.sequence_dims(), mesh, self.sequence_multiple(mesh.size(), spec)
        )


class AppliedContextParallel(AppliedAxis):
    """Cuts this rank's tokens from each batch."""

    def __init__(
        self, module: nn.Module, method: str, dims: Mapping[str, int], mesh: DeviceMesh, multiple: int
    ) -> None:
        """dims: the dim to cut, for each entry of the batch that is cut. multiple: sequence lengths must be multiples of it."""
        super().__init__(module)
        self._method, self._dims, self._multiple = method, dims, multiple
        self._rank, self._size = mesh.get_local_rank(), mesh.size()

    def split_batch(self, batch: Batch) -> Batch:
        """This rank's tokens, and `positions`: their places in the full sequence, (seq,); of a packed row, a part of each sample
        by the ring."""
        assert isinstance(batch, Mapping)  # a model with sequence_dims names its inputs
        name, dim = next(iter(self._dims.items()))
        seq = batch[name].shape[dim]
        if seq % self._multiple:
            raise UsageError(
                f"[parallelism] context = {self._size}: found sequences of {seq} tokens, expected a multiple of "
                f"{self._multiple}"
            )
        documents: Documents | None = batch.get("documents")
        place = self._place(documents or Documents([seq]))
        cut = {key: batch[key].index_select(at, place.to(batch[key].device)) for key, at in self._dims.items()}
        positions = batch["positions"][place] if documents is not None else place.to(batch[name].device)
        if documents is not None and self._method == "ring":
            cut["documents"] = Documents([length // self._size for length in documents.lengths])
        return {**batch, **cut, "positions": positions}

    def _place(self, documents: Documents) -> Tensor:
        """This rank's tokens of a row of sequences."""
        if self._method != "ring":
            return torch.arange(sum(documents.lengths)).chunk(self._size)[self._rank]
        spans = documents.spans
        return torch.cat(
            [span.start + ring.positions(span.stop - span.start, self._size, self._rank) for span in spans]
        )


@hookimpl
def hpctrain_parallelism() -> list[type[Parallelism]]:
    return [ContextParallel]
