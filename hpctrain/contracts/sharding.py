"""The slot `sharding`: the ranks that hold parameters, gradients and optimizer state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.contracts.compression import GradientSums
from hpctrain.contracts.life_cycle import PluginState
from hpctrain.contracts.model import ModelSpec
from hpctrain.contracts.pieces import Piece
from hpctrain.contracts.plugin import Plugin

_MOST = 1000  # a program's step may have any number of forwards


class Sharding(Plugin):
    """A strategy: which rank holds which parameters, gradients and optimizer state, and when gradients are summed.

    `[sharding] stage = N` is short for the name "zero-N".
    """

    tells_spans: ClassVar[bool] = False
    """Whether its buckets give the place of each parameter in them; compression with error feedback needs that."""

    sums_by_piece: ClassVar[bool] = False
    """Whether it sums each parameter over `sums.group(axis, piece.axes)`, not over the whole axis; an axis with parameters of its
    own (AxisTraits.has_own_parameters) needs that."""

    divides: ClassVar[frozenset[str] | None] = None
    """The kinds among "parameters", "gradients" and "optimizer state" of which each data-parallel rank of a replica keeps a
    part, for the estimate of `hpctrain check`; None: unknown."""

    ranks_diverge: ClassVar[bool] = False
    """Whether ranks have different values of one parameter between calls of `ShardedModel.consolidate`. Plugins that keep tensors
    beside the pieces, such as averages of the weights, refuse that."""

    @abstractmethod
    def axes(self, ranks: int, replicate: int) -> dict[str, int]:
        """The mesh axes of `ranks` data-parallel ranks, outermost first; the product of their sizes is `ranks`.

        The names are the strategy's own (dp_replicate and dp_shard in the ZeRO stages), and the same for any number of ranks.
        `replicate` is the job's `[parallelism] replicate` (1 by default) and divides `ranks`.
        """

    def home(self, device: torch.device) -> torch.device:
        """The device of the parameters of a rank that computes on `device`."""
        return device

    @abstractmethod
    def shard(self, module: nn.Module, spec: ModelSpec, mesh: DeviceMesh, sums: GradientSums) -> ShardedModel:
        """Prepare the module: on the meta device, or with values on the CPU where the model is no `MetaModel`.

        Parallelism, activation checkpointing and compile have been applied; parameters may be DTensors. `mesh` has
        the strategy's `axes`. Parameters that are left as DTensors get only the rows that this rank holds.
        Called in the context of `Precision.forward`, so that torch knows in which dtype autocast computes products.
        Gradients are summed with what `sums.bucket` makes, so that `[compression]` holds for every strategy.
        """


class ShardedModel(ABC):
    """A module that a strategy has sharded, on one rank of one run.

    The trainer calls `materialized` once the module has values; for each step `begin(last)` before each micro batch's
    forward, `synchronize()` once after the last backward, and `refresh()` after the optimizer's step.

    The optimizer updates the tensors of `pieces()`, plain tensors of this rank: an optimizer whose update of an element
    depends on that element's gradient and state alone gives the same numbers under every strategy.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.ran: deque[str] = deque(maxlen=_MOST)
        """The names of the parts that have run in training, in order, where ranks must run the same: a strategy that gathers
        parameters in forward adds them, and "" at the end of a forward. The trainer compares and clears them in each step."""

    @abstractmethod
    def materialized(self) -> None:
        """Every parameter has its first value and its device: lay out what `pieces` gives."""

    @abstractmethod
    def begin(self, last: bool, interleaved: bool = False) -> None:
        """A micro batch begins; `last` is true for the last one of the step.

        interleaved: the forwards and backwards of all the step's micro batches follow, in any order.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until this rank's gradients are summed over the data-parallel ranks.

        Afterwards every piece has a gradient: a parameter that no rank used has zeros.
        """

    def restart(self, last: bool) -> None:
        """Begin the step anew in a program's own loop: it drops the gradients of the step's micro batches so far, after
        `begin(last)` of the next one, whose forward may have run: its gradients become the step's first ones. Collective."""
        self.synchronize()  # ends the micro batches; nobody reads the sums
        self.begin(last)

    def keep_whole(self) -> None:
        """Keep parameters whole until `begin` or `synchronize`: a program's own loop differentiates through the module outside of
        the micro batch's backward, whose graph may contain this (a gradient penalty), so gradients may come late. Called after the
        forward that is differentiated, before the first operator of its backward."""
        return

    def watch(self, used: Callable[[str, bool], None]) -> None:
        """Call `used` where a backward adds to the gradient of a trained parameter: with its name, and whether a forward has used
        it in this form. A parameter that is cut between forwards may get a gradient without a forward."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                # no method of this class: parameters would keep the model alive by their hooks
                parameter.register_post_accumulate_grad_hook(partial(_tell, used, name))

    def rest(self) -> None:
        """Give the module the parameters again that it has between steps: a program's forward without a backward is over."""
        return

    def adopt(self) -> None:
        """Bring pieces that are copies of the module's parameters up to date: a program may have changed these in place."""
        return

    def refresh(self) -> None:
        """Bring the module up to date: a step or a restore has changed the values of the pieces. Collective."""
        return

    def stepped(self, step: int) -> None:
        """`step` optimizer steps are done; called after `refresh`, and not after a restore. Collective."""
        return

    def consolidate(self) -> None:
        """Make the pieces and the optimizer's state those of one model, before an evaluation or a save. Collective.

        Training goes on from there, and so does a resume, so both are the same run. No `refresh` follows.
        """
        return

    def state(self) -> PluginState | None:
        """The strategy's state in checkpoints besides the pieces and the optimizer's state, or None. Not collective.

        Asked when the optimizer has its state: before a restore, and at each save after `consolidate`. A value that differs
        between n ranks is a piece of the shape (n, ...) of which each rank has one row. `restore` is called before `refresh`.
        """
        return None

    @abstractmethod
    def pieces(self) -> list[Piece]:
        """The pieces that this rank's optimizer updates, without empty ones; a piece's gradient is `piece.tensor.grad`.

        Each `piece.tensor` is a leaf, which the optimizer gets as it is. It may be a part of a parameter, and several
        pieces may belong to one parameter.
        """

    def optimizer(
        self, groups: list[dict[str, Any]], build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        """The optimizer over `groups` (parameter groups over the tensors of `pieces`), made with `build`.

        Called again where a run begins anew or resumes before its first step: the last result trains.
        """
        return build(groups)


def _tell(used: Callable[[str, bool], None], name: str, _: nn.Parameter) -> None:
    used(name, True)
