"""A model of a program's loop, to be called as the module that it was."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpctrain.base.errors import TrainingError
from hpctrain.contracts.model import map_tensors, tensors_in


class OwnModule(nn.Module):
    """The module as this rank has it, under the job's precision. Its attributes are the module's."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        dtype: torch.dtype,
        context: Callable[[], AbstractContextManager[None]],
        forwarding: Callable[[], Callable[[], None] | None],
        drop: Callable[[], None] | None,
    ) -> None:
        """dtype: of floating point inputs. context: for a forward. forwarding: is told of each; returns what is called when a
        backward comes to its outputs, None where none can. drop: drops the gradients."""
        super().__init__()
        self.module = module
        self._name, self._dtype, self._context, self._forwarding = name, dtype, context, forwarding
        self._inside, self._drop = False, drop
        for inner, part in module.named_modules():
            if inner.count(".") < 2:  # deeper ones are reached by these, and each hook costs time
                part.register_forward_pre_hook(self._refuse_part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's outputs, whole where tensor parallelism has cut them; floating ones of 16 bits in float32, as a loss needs
        them."""
        reached = self._forwarding()
        self._inside = True
        try:
            with self._context():
                outputs = self.module(*self._converted(args), **self._converted(kwargs))
        finally:
            self._inside = False
        outputs = map_tensors(_widened, outputs)
        for one in tensors_in(outputs) if reached is not None else ():
            if one.requires_grad:
                one.register_hook(_calling(reached))
        return outputs

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as the optimizer's `zero_grad` does."""
        if self._drop is not None:
            self._drop()

    def _converted(self, inputs: Any) -> Any:
        def converted(one: Tensor) -> Tensor:
            return one.to(self._dtype) if one.is_floating_point() else one

        return map_tensors(converted, inputs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def _refuse_part(self, part: nn.Module, _: Any) -> None:
        if not self._inside and torch.is_grad_enabled():
            raise TrainingError(
                f"the program calls {type(part).__name__}, a part of the model {self._name!r}; call the model that setup returned: "
                "the ranks gather parameters and sum gradients around its forward"
            )


def _calling(function: Callable[[], None] | None) -> Callable[[Tensor], None]:
    def call(_: Tensor) -> None:
        if function is not None:
            function()

    return call


def _widened(one: Tensor) -> Tensor:
    one = one.full_tensor() if isinstance(one, DTensor) else one
    return one.float() if one.is_floating_point() and one.dtype.itemsize < 4 else one
