"""The slots `parallelism`, `sharding` and `activation_checkpointing`: how a model lies on the ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.contracts.model import Batch, ModelSpec
from hpctrain.contracts.pieces import Piece
from hpctrain.contracts.plugin import Plugin
from hpctrain.contracts.runner import Runner, RunnerParts

if TYPE_CHECKING:
    from hpctrain.gradients.sums import GradientSums


class Parallelism(Plugin):
    """One axis of the mesh besides the data axes. `[parallelism] NAME = size`, or a table with `size` and options."""

    axis: ClassVar[str]
    """The mesh axis, in the field's short form: "tp", "pp", "cp"."""

    order: ClassVar[int]
    """Its place in the mesh, outermost first. pp is 10, dp_replicate 20, dp_shard 30, cp 40, tp 50."""

    repeats_loss: ClassVar[bool] = False
    """Whether every rank of the axis computes the same loss (tp), rather than a part of it or none."""

    cuts_samples: ClassVar[bool] = False
    """Whether the ranks of the axis have parts of the same samples (cp). To the sharding stage they are data-parallel
    ranks then: gradients are summed over them, and what it shards is sharded over them, too."""

    splits_module: ClassVar[bool] = False
    """Whether the ranks of the axis have different parameters (pp), so that each name lies on one of them only."""

    @property
    def repeats_activations(self) -> bool:
        """Whether all ranks of the axis have the same activations between the blocks (tp without sequence parallelism)."""
        return False

    @property
    def shares_heads(self) -> bool:
        """Whether each rank has some of the attention heads (tp, Ulysses): the sizes of all such axes divide them together."""
        return False

    @property
    def splits_backward(self) -> bool:
        """Whether a block's backward comes in two: one for its input, one for its parameters (pp's zero bubble)."""
        return False

    one_shape: ClassVar[bool] = False
    """Whether all micro batches must have the same shape, so that batches by token budget can't be had (pp)."""

    one_compiled_shape: ClassVar[bool] = False
    """Whether that is so where blocks are compiled (tp)."""

    def sequence_multiple(self, size: int) -> int:
        """What the length of a batch must be a multiple of for `size` ranks of this axis to cut it."""
        return 1

    def refuse(self, spec: ModelSpec, size: int) -> str | None:
        """Why this model cannot be spread over `size` ranks of this axis, in a sentence; None when it can.

        A UsageError that it raises is told as it is. `spec.outline` shows the modules of most models.
        """
        return None

    def refuse_micro_batches(self, count: int, size: int) -> str | None:
        """Why `size` ranks of this axis cannot run a step of `count` micro batches, in a sentence; None when they can."""
        return None

    def refuse_compile(self, whole: bool) -> str | None:
        """Why `[compile]` does not go with this axis, in a sentence; None when it does.

        whole: a block must be compiled in one piece (`ActivationCheckpointing.is_compiled`), or as far as it can be.
        """
        return None

    @abstractmethod
    def apply(self, module: nn.Module, spec: ModelSpec, mesh: DeviceMesh) -> nn.Module:
        """Change the module (on the meta device) for this rank's place on the axis; `mesh` is one-dimensional."""

    def context(self) -> AbstractContextManager[object]:
        """Entered around forward, loss and backward of each micro batch."""
        return nullcontext()

    def split_batch(self, batch: Batch) -> Batch:
        """What this rank of the axis gets of a micro batch; called ahead of the step, in a thread of its own."""
        return batch

    def runner(self, parts: RunnerParts) -> Runner | None:
        """What runs the micro batches in place of one after the other; None where that is right."""
        return None


class ActivationCheckpointing(Plugin):
    """Trades activation memory for a second forward pass."""

    is_compiled: ClassVar[bool] = False
    """Whether `[compile]` takes the blocks as `apply` leaves them. If not, `apply` gets blocks whose forward is compiled."""

    def refuse(self, spec: ModelSpec, splits_backward: bool) -> str | None:
        """Why this mode can't be had, in a sentence; None when it can. A UsageError that it raises is told as it is.

        splits_backward: that of any axis (`Parallelism.splits_backward`). `spec.outline` shows the modules of most models.
        """
        return None

    @abstractmethod
    def apply(self, module: nn.Module, spec: ModelSpec, replicas: DeviceMesh | None) -> None:
        """Change the blocks of `module` in place without renaming any parameter.

        replicas: the one-dimensional mesh of ranks whose blocks get the same inputs (see
        `Parallelism.repeats_activations`); None where each rank's are its own.
        """


class Sharding(Plugin):
    """One ZeRO stage: who holds parameters, gradients and optimizer state, and when gradients are summed.

    Its name is the stage as text. The trainer calls `apply` on the module before it has values and `materialized`
    once it has them; for each step `begin(last)` before each micro batch's forward, `synchronize()` once after
    the last backward, and `refresh()` after the optimizer's step.

    What the optimizer updates are the tensors of `pieces()`, plain tensors of this rank: an optimizer whose update
    of an element depends on that element's gradient and state alone gives the same numbers under every stage.
    """

    tells_spans: ClassVar[bool] = False
    """Whether it says of each bucket which parameters lie where in it; compression with error feedback needs that."""

    @abstractmethod
    def axes(self, ranks: int, replicate: int) -> dict[str, int]:
        """How `ranks` data-parallel ranks are cut into the axes dp_replicate and dp_shard; the product is `ranks`.

        `replicate` is the job's `[parallelism] replicate` (1 by default) and divides `ranks`.
        """

    def refuse(self, spec: ModelSpec, axes: Mapping[str, int]) -> str | None:
        """Why this stage can't train the model on a mesh of `axes` (all of them), in a sentence; None when it can.

        A UsageError that it raises is told as it is.
        """
        return None

    @abstractmethod
    def apply(self, module: nn.Module, spec: ModelSpec, mesh: DeviceMesh, sums: GradientSums) -> nn.Module:
        """Prepare the module: on the meta device, or with values on the CPU where the model says `meta = False`.

        Parallelism, activation checkpointing and compile have been applied; parameters may be DTensors. `mesh` has
        the axes dp_replicate and dp_shard. Parameters that are left as DTensors get only the rows that this rank holds.
        Gradients are summed with what `sums.bucket` makes, so that `[compression]` holds for every stage.
        """

    def home(self, device: torch.device) -> torch.device:
        """Where the parameters of a rank that computes on `device` are kept."""
        return device

    @abstractmethod
    def materialized(self, module: nn.Module) -> None:
        """Every parameter has its first value and its device: lay out what `pieces` gives."""

    @abstractmethod
    def begin(self, last: bool, interleaved: bool = False) -> None:
        """A micro batch begins; `last` is true for the last one of the step.

        interleaved: what follows are the forwards and backwards of all the step's micro batches, in any order.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until this rank's gradients are summed over the data-parallel ranks.

        Afterwards every piece has a gradient: a parameter that no rank used has zeros.
        """

    def refresh(self) -> None:
        """The values of the pieces have changed, by a step or a restore: bring the module up to date; collective."""
        return

    @abstractmethod
    def pieces(self) -> list[Piece]:
        """What this rank's optimizer updates, without empty pieces; a piece's gradient is `piece.tensor.grad`.

        Each `piece.tensor` is a leaf that is given to the optimizer as it is. It may be a part of a parameter, and
        several pieces may be of one parameter.
        """

    @abstractmethod
    def optimizer(
        self, groups: list[dict[str, Any]], build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        """The optimizer over `groups` (parameter groups over the tensors of `pieces`), made with `build`."""
