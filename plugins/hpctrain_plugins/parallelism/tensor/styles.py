"""The styles of a tensor-parallel plan. x is (batch, seq, hidden). With sequence parallelism, activations between the blocks
are cut along seq (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from hpctrain.toolkit.attention import narrowed

_SEQ = 1
NARROWED = ("colwise", "colwise_rep", "vocabulary")
"""Styles of Linears whose whole inputs travel, or their gradients."""


def _colwise(module: nn.Module, sequence: bool) -> ParallelStyle:
    return ColwiseParallel()


def _rowwise(module: nn.Module, sequence: bool) -> ParallelStyle:
    rest = Shard(_SEQ) if sequence else Replicate()
    if isinstance(module, nn.Embedding):
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=rest)
    return RowwiseParallel(output_layouts=rest)


def _embedding(module: nn.Module, sequence: bool) -> ParallelStyle:
    return RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())


def _replicated_output(module: nn.Module, sequence: bool) -> ParallelStyle:
    return ColwiseParallel(input_layouts=Shard(_SEQ) if sequence else Replicate(), output_layouts=Replicate())


def _replicated_input(module: nn.Module, sequence: bool) -> ParallelStyle:
    return RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(_SEQ) if sequence else Replicate())


def _vocabulary(module: nn.Module, sequence: bool) -> ParallelStyle:
    # the output is a DTensor, so that cross_entropy works on the cut vocabulary
    return ColwiseParallel(input_layouts=Shard(_SEQ) if sequence else Replicate(), use_local_output=False)


class _FirstInput(ParallelStyle):
    """Lays out a module's first input anew, whether it has a name or not."""

    def __init__(self, before: Replicate | Shard, after: Replicate | Shard, local: bool) -> None:
        """local: whether the module gets its part as a plain tensor."""
        super().__init__()
        self._before, self._after, self._local = before, after, local

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def lay_out(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
            name = "" if inputs else next(iter(named))
            [given] = narrowed(inputs[0] if inputs else named[name])
            laid = DTensor.from_local(given, device_mesh, (self._before,), run_check=False)
            made = laid.redistribute(placements=(self._after,))
            first = made.to_local() if self._local else made
            return ((first, *inputs[1:]), named) if inputs else (inputs, {**named, name: first})

        module.register_forward_pre_hook(lay_out, with_kwargs=True)
        return module


def _gather(module: nn.Module, sequence: bool) -> ParallelStyle:
    return _FirstInput(Shard(_SEQ) if sequence else Replicate(), Replicate(), local=False)


def _split(module: nn.Module, sequence: bool) -> ParallelStyle | None:
    return _FirstInput(Replicate(), Shard(_SEQ), local=True) if sequence else None


def _norm(module: nn.Module, sequence: bool) -> ParallelStyle | None:
    return SequenceParallel(sequence_dim=_SEQ, use_local_output=True) if sequence else None


def _head_norm(module: nn.Module, sequence: bool) -> ParallelStyle:
    # heads are cut along a dim that the norm does not reduce; any such dim makes the gradient a sum over ranks
    return SequenceParallel(sequence_dim=0, use_local_output=True)


def _positions(module: nn.Module, sequence: bool) -> ParallelStyle | None:
    # (seq, hidden), without batch: every rank computes all positions and keeps its part
    if not sequence:
        return None
    return PrepareModuleOutput(output_layouts=(Replicate(),), desired_output_layouts=(Shard(0),))


STYLES: dict[str, Callable[[nn.Module, bool], ParallelStyle | None]] = {
    "colwise": _colwise,
    "rowwise": _rowwise,
    "embedding": _embedding,
    "colwise_rep": _replicated_output,
    "rowwise_rep": _replicated_input,
    "vocabulary": _vocabulary,
    "gather": _gather,
    "split": _split,
    "norm": _norm,
    "head_norm": _head_norm,
    "positions": _positions,
}
"""colwise: cuts the outputs of a Linear, which needs the whole input. rowwise: cuts the inputs of a Linear and sums the
outputs; cuts the rows of an Embedding. embedding: the same, with whole outputs under sequence parallelism, too. colwise_rep: as
colwise, then gathers the output. rowwise_rep: as rowwise, but each rank takes its part of a whole input. vocabulary: for the
head, whose logits stay cut for the loss. head_norm: for a norm of each head, between colwise and rowwise; a rank has all its
parameters and some of the heads. gather: gathers the input of a module once for all its children. split, norm, positions: under
sequence parallelism, for a first block behind whole embeddings, a norm and a position embedding; no effect without it."""
