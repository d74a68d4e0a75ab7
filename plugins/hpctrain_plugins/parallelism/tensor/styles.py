"""What the entries of a tensor-parallel plan mean. x is (batch, seq, hidden); with sequence parallelism, what lies between
the blocks is cut along seq (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

_SEQ = 1


def _colwise(module: nn.Module, sequence: bool) -> ParallelStyle:
    return ColwiseParallel()


def _rowwise(module: nn.Module, sequence: bool) -> ParallelStyle:
    rest = Shard(_SEQ) if sequence else Replicate()
    if isinstance(module, nn.Embedding):
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=rest)
    return RowwiseParallel(output_layouts=rest)


def _replicated_output(module: nn.Module, sequence: bool) -> ParallelStyle:
    return ColwiseParallel(input_layouts=Shard(_SEQ) if sequence else Replicate(), output_layouts=Replicate())


def _replicated_input(module: nn.Module, sequence: bool) -> ParallelStyle:
    return RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(_SEQ) if sequence else Replicate())


def _vocabulary(module: nn.Module, sequence: bool) -> ParallelStyle:
    # a DTensor comes out: cross_entropy then works on the cut vocabulary
    return ColwiseParallel(input_layouts=Shard(_SEQ) if sequence else Replicate(), use_local_output=False)


def _gather(module: nn.Module, sequence: bool) -> ParallelStyle:
    return PrepareModuleInput(
        input_layouts=(Shard(_SEQ) if sequence else Replicate(),),
        desired_input_layouts=(Replicate(),),
    )


def _norm(module: nn.Module, sequence: bool) -> ParallelStyle | None:
    return SequenceParallel(sequence_dim=_SEQ, use_local_output=True) if sequence else None


def _head_norm(module: nn.Module, sequence: bool) -> ParallelStyle:
    # the heads of a rank lie along some dim that the norm does not look along; any of these makes gradients a sum
    return SequenceParallel(sequence_dim=0, use_local_output=True)


def _positions(module: nn.Module, sequence: bool) -> ParallelStyle | None:
    # (seq, hidden), no batch; every rank computes all and keeps its part
    if not sequence:
        return None
    return PrepareModuleOutput(output_layouts=(Replicate(),), desired_output_layouts=(Shard(0),))


STYLES: dict[str, Callable[[nn.Module, bool], ParallelStyle | None]] = {
    "colwise": _colwise,
    "rowwise": _rowwise,
    "colwise_rep": _replicated_output,
    "rowwise_rep": _replicated_input,
    "vocabulary": _vocabulary,
    "gather": _gather,
    "norm": _norm,
    "head_norm": _head_norm,
    "positions": _positions,
}
"""colwise: a Linear's outputs are cut; its input must be whole. rowwise: its inputs are cut and the outputs summed; an
Embedding's rows are. colwise_rep: cut, with the output gathered. rowwise_rep: of a whole input each rank takes its part.
vocabulary: the head; its logits stay cut for the loss. head_norm: a norm of each head, between colwise and rowwise: a rank has
all of its parameters and some of the heads.
gather: a module whose input is gathered once for all that is in it. norm, positions: what sequence parallelism changes of
a norm and of a position embedding. Without sequence parallelism the last two stand for nothing."""
