"""The slots `optimizer` and `schedule`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from hpctrain.contracts.plugin import Options, Plugin


class OptimizerOptions(Options):
    """Options of every optimizer: a learning rate, which schedule and scaling multiply."""

    lr: float = Field(ge=0, description="peak learning rate; 0 changes nothing, for a probe")


class Optimizer(Plugin):
    """Builds a torch optimizer over parameter groups."""

    Options: ClassVar[type[Options]] = OptimizerOptions

    @abstractmethod
    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimizer over `groups` in torch's form: each has `params` and the group's value of each option of this plugin.

        The job is refused unless the optimizer has every parameter of the groups, at its group's `lr` or at that of another
        option. A group's `lr` is set to a number before each step. State of a tensor subclass (quantized, say) is saved as the
        result of its `dequantize()`, a plain tensor of the same shape, and restored with its `copy_()`. Where a parameter is cut
        over ranks, its state must be a number or have the part's shape, and the update of the part must not depend on the rest,
        or the job is refused.
        """


class WholeTensors:
    """Access to whole tensors of which ranks hold parts. This class is for ranks that hold each tensor whole."""

    def map(
        self, tensors: Sequence[Tensor], values: Sequence[Tensor], function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Call `function` with the whole of each value, and cut what it returns as `tensors` are: all parameters of a group.

        values: of the shapes and dtypes of `tensors`, such as their momentum. function: gets and returns a tensor of the
        parameter's whole shape. One of the ranks that hold parts of a value calls it, so it must not depend on the rank.
        Collective: each rank calls `map` for the same groups, with no tensors where it holds none.
        """
        return [function(value) for value in values]  # nothing is cut


class MatrixOptimizer(Optimizer):
    """An optimizer whose update of a parameter needs all of it (Muon, Shampoo), under any layout."""

    @abstractmethod
    def build_whole(self, groups: list[dict[str, Any]], whole: WholeTensors) -> torch.optim.Optimizer:
        """Build the optimizer, as `build` does. An update that needs more than each element by itself goes through `whole.map`;
        state belongs to the part."""

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return self.build_whole(groups, WholeTensors())


class Schedule(Plugin):
    """A factor on the learning rate: a pure function of the step, so a resume has nothing to restore."""

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """The factor for optimizer step `step` (0-based) of a job of `steps` steps."""
