"""Cuts a model into pipeline stages without renaming its modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.api import (
    MicroBatch,
    PipelineModel,
    Precision,
    UsageError,
    children_of,
    is_view,
    without_trace,
)
from hpctrain_plugins.parallelism.pipeline.passing import MOST_DIMS


def split(blocks: int, stages: int, given: Sequence[int]) -> list[range]:
    """The blocks of each pipeline stage: as given, else evenly, with one more in the first stages if needed.

    Raises UsageError if that is not possible.
    """
    if given and (len(given) != stages or sum(given) != blocks or min(given) < 1):
        raise UsageError(
            f"[parallelism.pipeline] split: found {list(given)}, expected {stages} numbers of at least 1 that add up to "
            f"the model's {blocks} blocks"
        )
    if blocks < stages:
        raise UsageError(
            f"[parallelism] pipeline: the model has {blocks} blocks, fewer than {stages} pipeline stages; use fewer stages"
        )
    counts = given or [blocks // stages + (stage < blocks % stages) for stage in range(stages)]
    ends = torch.tensor(counts).cumsum(0).tolist()
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def drop(module: nn.Module, unwanted: Sequence[nn.Module]) -> None:
    """Remove modules. Their places keep their names and are empty."""
    for parent in list(module.modules()):
        for name, child in list(
            children_of(parent).items()
        ):  # named_children lists a module in several places only once
            if any(child is one for one in unwanted):
                setattr(parent, name, None)


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """The tensors in a model's outputs."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        yield from _tensors(list(outputs.values()))
    elif isinstance(outputs, (list, tuple)):
        yield from (tensor for one in outputs for tensor in _tensors(one))
    elif is_dataclass(outputs):
        yield from _tensors(list(vars(outputs).values()))


class PipelineStage(nn.Module):
    """The computation of one pipeline stage for a micro batch, which is passed as a number.

    The first stage starts from the batch, the others from (batch, seq, hidden). The last returns the model's outputs.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: PipelineModel,
        precision: Precision,
        device: torch.device,
        blocks: Sequence[nn.Module],
        first: bool,
        last: bool,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self._whole = [module]  # in a list, so that its parameters do not all become this stage's
        before, after = spec.ends(module)
        self.before = nn.ModuleList(before if first else [])
        self.after = nn.ModuleList(after if last else [])
        self.copies = nn.ParameterList()  # copies of other stages' parameters, so that schedules find them here
        self._spec, self._precision, self._device, self._first, self._last = spec, precision, device, first, last
        self._works_in_place = any(getattr(one, "inplace", False) for one in self.blocks.modules())
        self.micro_batches: list[MicroBatch] = []
        self.in_step = False
        """Whether a micro batch runs. Before that, torch runs one forward for shapes; after the first stage it is noise."""
        self.outputs: Any = None
        """Outputs of the latest forward of the last stage."""
        self.input_is_trained = False
        """Whether the latest `value` required a gradient."""

    def forward(self, value: Tensor, index: Tensor) -> Tensor:
        """The hidden state for the next stage; in the last stage a tensor of the model's outputs, all of which `outputs` has.

        value: from the previous stage; in the first stage, `index` again. index: (1,), the number of the micro batch.
        """
        whole, self.input_is_trained = self._whole[0], value.requires_grad
        looks = torch.is_grad_enabled() and not self.in_step
        with without_trace(whole, self._device) if looks else nullcontext(), self._precision.forward(self._device):
            hidden = (
                self._spec.embed(whole, self.micro_batches[int(index)].batch) if self._first else self._received(value)
            )
            for block in self.blocks:
                hidden = block(hidden)
            if not self._last:
                return self._passed_on(hidden)
            self.outputs = self._spec.head(whole, hidden)
            return self._tensor_of(self.outputs)

    def _tensor_of(self, outputs: Any) -> Tensor:
        """A tensor that torch's schedules can take for any outputs. Raises UsageError if there is none."""
        leaves = list(_tensors(outputs))
        if not leaves:
            raise UsageError(
                f"[parallelism] pipeline: the outputs of {self._spec.name} are {type(outputs).__name__} without a tensor, expected "
                "a tensor, or a dict, list or named tuple of tensors"
            )
        return next((one for one in leaves if one.requires_grad), leaves[0])

    def _received(self, value: Tensor) -> Tensor:
        """The input of the blocks. `value` is a leaf of this stage's backward and must not be changed in place."""
        return value.clone() if self._works_in_place else value

    def _passed_on(self, hidden: Any) -> Tensor:
        """The output for the next stage. Raises UsageError if it can't be sent."""
        if not isinstance(hidden, Tensor) or not hidden.is_floating_point() or hidden.dim() > MOST_DIMS:
            found = f"{hidden.dtype} of {hidden.dim()} dims" if isinstance(hidden, Tensor) else type(hidden).__name__
            raise UsageError(
                f"[parallelism] pipeline: the output of a block of {self._spec.name} for the next stage is {found}, expected a "
                f"floating-point tensor of at most {MOST_DIMS} dims"
            )
        # zero-bubble detaches it in place, which fails for views
        return hidden.clone() if is_view(hidden) else hidden
