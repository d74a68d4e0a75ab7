"""The plugin `context`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.api import AxisTraits, Batch, Field, ModelSpec, Options, Parallelism, UsageError, hookimpl
from hpctrain_plugins.parallelism.context import ring, ulysses


class ContextOptions(Options):
    method: Literal["ring", "ulysses"] = Field(
        default="ring",
        description="ring passes keys and values round; ulysses exchanges tokens for heads, which must divide",
    )


class Context(Parallelism):
    """Cuts sequences over the ranks of the axis cp."""

    name = "context"
    Options = ContextOptions
    options: ContextOptions

    @property
    def traits(self) -> AxisTraits:
        return AxisTraits("cp", 40, "parts of samples", shares_heads=self.options.method == "ulysses")

    def sequence_multiple(self, size: int) -> int:
        return size * (2 if self.options.method == "ring" else 1)

    def refuse(self, spec: ModelSpec, size: int) -> str | None:
        if not spec.sequence_dims():
            return f"the model {spec.name!r} does not say which of its inputs are sequences (sequence_dims)"
        heads = spec.attention_heads
        if self.options.method == "ulysses" and heads is not None and heads % size:
            return f'the model has {heads} attention heads, which {size} ranks do not divide; use method = "ring"'
        return None

    def refuse_compile(self, whole: bool) -> str | None:
        if whole and self.options.method == "ring":
            return (
                'method = "ring" is not compiled, and this activation checkpointing needs each block in one piece; use method = '
                '"ulysses", or [activation_checkpointing] mode = "full"'
            )
        return None

    def apply(self, module: nn.Module, spec: ModelSpec, mesh: DeviceMesh) -> nn.Module:
        self._dims, self._rank, self._size = spec.sequence_dims(), mesh.get_local_rank(), mesh.size()
        # what sends and receives is no graph: the compiler takes what is before and after it
        passing_round = torch.compiler.disable(ring.ring_attention)
        attend = passing_round if self.options.method == "ring" else ulysses.ulysses_attention
        attentions: list[Any] = spec.attentions(module)
        if not attentions:
            raise UsageError(f"[parallelism] context: the model {spec.name!r} names no attentions")
        for attention in attentions:
            attention.attend = partial(attend, group=mesh.get_group())
        return module

    def split_batch(self, batch: Batch) -> Batch:
        """This rank's tokens, and `positions`: where each stood in its sequence, (seq,)."""
        assert isinstance(batch, Mapping)  # a model with sequence_dims names its inputs
        name, dim = next(iter(self._dims.items()))
        seq, unit = batch[name].shape[dim], self.sequence_multiple(self._size)
        if seq % unit:
            raise UsageError(
                f"[parallelism] context = {self._size}: found sequences of {seq} tokens, expected a multiple of {unit} "
                f"with method = {self.options.method!r}",
                everywhere=True,
            )
        place = (ring if self.options.method == "ring" else ulysses).positions(seq, self._size, self._rank)
        cut = {key: batch[key].index_select(at, place.to(batch[key].device)) for key, at in self._dims.items()}
        return {**batch, **cut, "positions": place.to(batch[name].device)}


@hookimpl
def hpctrain_parallelism() -> list[type[Parallelism]]:
    return [Context]
