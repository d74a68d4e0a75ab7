"""The slots `parallelism`, the axes of the mesh over which a model is spread, and `pipeline_schedule`, the order in which a
pipeline's stages run the forwards and backwards of a step's micro batches."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args, get_type_hints

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.base.errors import UsageError
from hpctrain.contracts.model import Batch, ModelSpec
from hpctrain.contracts.plugin import Plugin
from hpctrain.contracts.runner import Runner, RunnerParts


@dataclass(frozen=True)
class AxisTraits:
    """The traits of a mesh axis. The core and other plugins ask for these, never for an axis by its name."""

    axis: str
    """The common short name of such an axis: "tp", "pp", "cp"."""

    order: int
    """The axis's place in the mesh, outermost first. pp is 10, the data axes 20, 21, ..., cp 40, tp 50."""

    ranks_have: Literal["the same samples", "parts of samples", "other parameters"]
    """The share that each rank of the axis has of a micro batch and of the model.

    "the same samples": all compute the same loss, which is counted once (tp). "parts of samples": each has the result of
    `split_batch` and a part of the loss; the sharding strategy takes them as data-parallel ranks, so it sums gradients over them,
    and shards over them, too (cp). "other parameters": each parameter lies on one of them only, and so does the loss (pp).
    """

    repeats_activations: bool = False
    """Whether all ranks have the same activations between the blocks (tp without sequence parallelism)."""

    shares_heads: bool = False
    """Whether each rank has some of the attention heads (tp, Ulysses): the product of such axes' sizes must divide their number."""

    has_own_parameters: bool = False
    """Whether `apply` cuts some parameters over ranks that have parts of samples (expert parallelism): each of these is a DTensor
    over the axis's mesh, and its gradient is summed only over the data-parallel ranks at one place on the axis."""

    interleaves: bool = False
    """Whether the forwards and backwards of a step's micro batches take turns (pp)."""

    splits_backward: bool = False
    """Whether a block's backward comes in two parts: for its input, and for its parameters (pp's zero bubble)."""

    one_shape: Literal["always", "compiled"] | None = None
    """The case in which all micro batches must have the same shape, so batches by token budget are refused: always (pp), or where
    blocks are compiled (tp)."""

    cuts_documents: bool = False
    """Whether `split_batch` takes packed rows, and cuts each sample in them (cp); for an axis with parts of samples."""

    @property
    def cuts_samples(self) -> bool:
        """Whether each rank has a part of the same samples."""
        return self.ranks_have == "parts of samples"

    def __post_init__(self) -> None:
        if self.has_own_parameters and not self.cuts_samples:
            raise UsageError(f'the axis {self.axis}: has_own_parameters goes with ranks_have = "parts of samples" only')
        choices = get_args(get_type_hints(AxisTraits)["ranks_have"])  # the annotation itself is a text
        if self.ranks_have not in choices:  # a typo would count as none of them, and train another model
            raise UsageError(
                f"the axis {self.axis}: its traits say that ranks have {self.ranks_have!r}; expected one of {', '.join(choices)}"
            )


class AppliedAxis:
    """An axis on one rank of one run, once it is applied to the module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def context(self) -> AbstractContextManager[object]:
        """A context around forward, loss and backward of each micro batch."""
        return nullcontext()

    def split_batch(self, batch: Batch) -> Batch:
        """This rank's share of a micro batch; called ahead of the step, on a thread of its own."""
        return batch

    def runner(self, parts: RunnerParts) -> Runner | None:
        """A runner that replaces the sequential one; None to keep it."""
        return None


class Parallelism(Plugin):
    """A mesh axis besides the data axes. `[parallelism] NAME = size`, or a table with `size` and options."""

    @property
    @abstractmethod
    def traits(self) -> AxisTraits:
        """The axis's traits under these options."""

    def sequence_multiple(self, size: int, spec: ModelSpec) -> int:
        """The number that must divide a batch's length, so that `size` ranks of this axis can cut it for the model `spec`."""
        return 1

    @abstractmethod
    def apply(self, module: nn.Module, spec: ModelSpec, mesh: DeviceMesh) -> AppliedAxis:
        """Change the module (on the meta device) for this rank's place on the axis; `mesh` is one-dimensional."""


class PipelineSchedule(Plugin):
    """A record of one schedule. `[parallelism.pipeline] schedule = NAME` chooses it; it takes no options."""

    stages_per_rank: ClassVar[tuple[int, int | None]] = (1, 1)
    """The fewest pipeline stages that a rank may have, and the most; None is any number."""

    splits_backward: ClassVar[bool] = False
    """Whether backward comes in two parts: for a stage's input, and for its parameters."""

    @abstractmethod
    def torch_class(self) -> Any:
        """A schedule class of torch.distributed.pipelining, or one with the same constructor and `step`.

        Import it in this method: torch's schedules bring half of its compiler with them.
        """

    def rank_of(self, stage: int, ranks: int) -> int:
        """The pipeline's rank with the stage; `torch_class` must place stages in the same way."""
        return stage % ranks

    def cannot_run(self, micro_batches: int, ranks: int, stages: int) -> str | None:
        """Why a step of `micro_batches` cannot be run, as the end of a sentence; None when it can."""
        return None
