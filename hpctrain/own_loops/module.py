"""A model of a program's loop as `setup` returns it: the module, with calls through the loop, and an optimizer of its pieces."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpctrain.base.errors import TrainingError, UsageError
from hpctrain.contracts.model import map_tensors, tensors_in
from hpctrain.own_loops.trained import Trained

_CALLS = "_hpctrain_calls"
Calling = Callable[[], AbstractContextManager[Callable[[Tensor], None] | None]]


@dataclass
class _Calls:
    dtype: torch.dtype
    """The dtype of floating point inputs."""
    calling: Calling
    """A context for a forward. It gives what is called when a backward comes to the outputs, None where none can."""
    drop: Callable[[], None] | None
    """Drops the gradients."""
    inside: bool = False
    """Whether a forward goes on."""
    method: str = "forward"
    """The method that nn.Module's call is to run."""


class OwnModule(nn.Module):
    """A class that `own` puts in front of a module's: calls of the module become calls of a model of the loop.

    Names, attributes and methods stay the module's own.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of the module's own class: a slice of a container is no model of the loop."""
        return cls.__mro__[2](*args, **kwargs)  # behind the class that `own` has made, and this one

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's outputs: whole where tensor parallelism has cut them, and 16-bit floats in float32, which a loss needs.
        Within a call it is the module's own forward: the parameters are gathered already."""
        if self.__dict__[_CALLS].inside:
            return self.forward(*args, **kwargs)
        return self._run("forward", args, kwargs)

    def _run(self, method: str, args: Any, kwargs: Any) -> Any:
        """Run a method as a call of the module: around it the strategies' hooks gather and free."""
        calls: _Calls = self.__dict__[_CALLS]
        with calls.calling() as reached:
            calls.inside, calls.method = True, method
            try:  # nn.Module's call runs `forward` below, whatever the method: the strategies have hooked it
                outputs = super().__call__(*_converted(args, calls.dtype), **_converted(kwargs, calls.dtype))
            finally:
                calls.inside, calls.method = False, "forward"
        outputs = map_tensors(_widened, outputs)
        for output in tensors_in(outputs) if reached is not None else ():
            if output.requires_grad:
                output.register_hook(reached)
        return outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, or the method that runs as one. If the program calls `forward` itself, it is a call."""
        calls: _Calls = self.__dict__[_CALLS]
        if not calls.inside:
            return self(*args, **kwargs)
        method, calls.method = calls.method, "forward"  # a forward that the method calls is the module's own
        return getattr(super(), method)(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as the optimizer's `zero_grad` does."""
        drop = self.__dict__[_CALLS].drop
        if drop is not None:  # else the model is frozen
            drop()

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Raises UsageError: a copy's forwards would be those of this model, which ranks may hold in parts."""
        raise UsageError(
            "deepcopy: found a model that is set up; copy the module before setup, and set the copy up, too"
        )


def _of_optimizer(name: str) -> Any:
    """An attribute of the optimizer that trains, to read: the start of the steps and a rollback replace that one."""
    return property(lambda self: getattr(self._trained.model.optimizer, name))


class OwnOptimizer(torch.optim.Optimizer):
    """The optimizer of the pieces that this rank holds. `step` is collective."""

    def __init__(self, trained: Trained) -> None:  # not torch's: it has no parameters of its own
        self._trained = trained

    param_groups = _of_optimizer("param_groups")
    """The groups, over this rank's pieces. A learning rate that the program sets holds until the schedule sets one."""
    state = _of_optimizer("state")
    """The state of this rank's pieces."""
    defaults = _of_optimizer("defaults")
    """The options of groups that have none of their own."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Unscale, judge, clip and update, on all ranks or on none. Collective."""
        if closure is not None:
            raise UsageError("step: found a closure, which evaluates the model several times a step; expected none")
        self._trained.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients: the next backward begins anew."""
        self._trained.zero_grad()

    def add_param_group(self, param_group: Any) -> None:
        """Raises UsageError: nobody would sum the gradients of these parameters."""
        raise UsageError("add_param_group: expected the optimizer to have all its groups when setup gets it")

    def state_dict(self) -> dict[str, Any]:
        """Raises UsageError: a checkpoint of the loop has it."""
        raise UsageError("state_dict: the loop's checkpoints have the optimizer's state, of which a rank holds a part")

    def load_state_dict(self, state_dict: Any) -> None:
        """Raises UsageError: a resume restores it."""
        raise UsageError("load_state_dict: a resume of the loop restores the optimizer's state")


def own(
    name: str,
    module: nn.Module,
    dtype: torch.dtype,
    calling: Calling,
    drop: Callable[[], None] | None,
    methods: Sequence[str],
) -> OwnModule:
    """Make the module a model of the loop; returns it. methods: those besides forward that the program calls. See `_Calls`."""
    calls = _Calls(dtype, calling, drop)

    def refuse_part(part: nn.Module, _: Any) -> None:
        if not calls.inside and torch.is_grad_enabled():  # without gradients, a part may be looked at
            raise TrainingError(
                f"the program calls {type(part).__name__}, a part of the model {name!r}; call the model that setup returned, or a "
                "method that you give setup(methods=[...]): the ranks gather parameters and sum gradients around these"
            )

    for inner, part in module.named_modules():
        if inner and inner.count(".") < 2:  # deeper ones are reached by these, and each hook costs time
            part.register_forward_pre_hook(refuse_part)
    module.__dict__[_CALLS] = calls
    unknown = [method for method in methods if not callable(getattr(type(module), method, None))]
    if unknown:
        raise UsageError(f"setup: methods: {type(module).__name__} has no method {unknown[0]!r}")
    bodies = {method: _method(method) for method in methods}
    # no wrapper: the module stays the program's object, with its parameters' names
    module.__class__ = types.new_class(
        type(module).__name__, (OwnModule, type(module)), exec_body=lambda own: own.update(bodies)
    )
    assert isinstance(module, OwnModule)
    return module


def _method(name: str) -> Callable[..., Any]:
    def call(self: OwnModule, *args: Any, **kwargs: Any) -> Any:
        if self.__dict__[_CALLS].inside:
            return getattr(super(type(self), self), name)(*args, **kwargs)
        return self._run(name, args, kwargs)

    return call


def _converted(inputs: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, inputs)


def _widened(output: Tensor) -> Tensor:
    output = output.full_tensor() if isinstance(output, DTensor) else output
    return output.float() if output.is_floating_point() and output.dtype.itemsize < 4 else output
