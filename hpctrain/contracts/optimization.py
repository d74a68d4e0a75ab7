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
        """The optimizer over `groups`, which are as torch optimizers take them: `params` and, for each option of this plugin, its
        value in that group.

        It has every parameter of the groups, at its group's `lr` or at that of another option, or the job is refused. A group's
        `lr` is set to a number before each step. State of a tensor subclass (quantized, say) is saved as what
        its `dequantize()` gives, a plain tensor of the same shape, and put back with its `copy_()`. Where a parameter
        is cut over ranks, its state must be a number or have the shape of the part, and its update of the part must not
        depend on the rest, or the job is refused.
        """


class WholeTensors:
    """Whole tensors of which ranks hold parts. This one is for a rank that holds all of each."""

    def map(
        self, tensors: Sequence[Tensor], values: Sequence[Tensor], function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Call `function` with the whole of each value, and cut what it returns as `tensors` are: all parameters of a group.

        values: of the shapes and dtypes of `tensors`, such as their momentum. function: returns a tensor of the shape that it gets,
        the parameter's. One of the ranks that hold parts of a value calls it, so it must not depend on the rank. Collective: each
        rank calls `map` for the same groups, with no tensors where it holds none.
        """
        return [function(value) for value in values]


class MatrixOptimizer(Optimizer):
    """An optimizer whose update of a parameter needs all of it (Muon, Shampoo), under any layout."""

    @abstractmethod
    def build_whole(self, groups: list[dict[str, Any]], whole: WholeTensors) -> torch.optim.Optimizer:
        """Build it, as `build` does. What needs more than an element of a part goes through `whole.map`; state is of the part."""

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return self.build_whole(groups, WholeTensors())


class Schedule(Plugin):
    """A factor on the learning rate: a pure function of the step, so that a resume has nothing to restore."""

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """The factor for optimizer step `step` (0-based) of a job of `steps` steps."""
