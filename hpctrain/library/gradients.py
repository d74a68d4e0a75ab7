"""The gradients of a model as a program sees and changes them: `parameter.grad`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpctrain.base.errors import TrainingError
from hpctrain.contracts.pieces import Piece

_IN_PARTS = "is not whole on this rank; read and change it inside of `with loop.parameters(model) as parameters:`"
_NOT_SUMMED = "is summed in the backward of the step's last micro batch; read and change it after that"


class Withheld(Tensor):
    """In the place of a gradient that a rank does not have: whoever uses it gets a TrainingError."""

    why: str

    @staticmethod
    def __new__(cls, parameter: Tensor, why: str) -> Withheld:
        make: Any = Tensor._make_wrapper_subclass
        one: Withheld = make(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)
        one.why = why
        return one

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises TrainingError."""
        inputs = [*args, *(kwargs or {}).values()]
        flat = [one for each in inputs for one in (each if isinstance(each, (list, tuple)) else [each])]
        raise TrainingError(next(one.why for one in flat if isinstance(one, Withheld)))

    __torch_dispatch__ = __torch_function__


class Gradients:
    """The gradients of this rank's pieces, and what the program sees of them.

    A parameter whose part on this rank is one piece has that piece's gradient as its `grad`: what the program does to it holds.
    Any other parameter has a `Withheld` one.
    """

    def __init__(self, name: str, parameters: Mapping[str, nn.Parameter], pieces: Sequence[Piece]) -> None:
        """name: of the model. parameters: the trained ones as they are between steps."""
        self._name, self._parameters, self._pieces = name, parameters, pieces
        self._shown: dict[str, Tensor | None] = {}
        self._of: dict[str, list[Tensor]] = {}
        for piece in pieces:
            self._of.setdefault(piece.name, []).append(piece.tensor)

    @property
    def are_dropped(self) -> bool:
        """Whether the program has set all of them to None."""
        return bool(self._shown) and all(one.grad is None for one in self._parameters.values())

    def all(self) -> list[Tensor]:
        """One for each piece: zeros where the program has dropped it."""
        tensors = [piece.tensor for piece in self._pieces]
        return [torch.zeros_like(one) if one.grad is None else one.grad for one in tensors]

    def show(self) -> None:
        """They are summed, or have changed: the program may read and change them."""
        for name, parameter in self._parameters.items():
            parts, local = self._of.get(name, []), _local(parameter)
            if len(parts) == 1 and parts[0].shape == local.shape and parts[0].device == local.device:
                if parts[0] is not parameter:
                    parameter.grad = None if parts[0].grad is None else _like(parameter, parts[0].grad)
            elif not parts and not local.numel():
                parameter.grad = _like(parameter, torch.zeros_like(local))
            else:
                parameter.grad = self._withheld(name, _IN_PARTS)
            self._shown[name] = parameter.grad

    def show_pending(self, used: Collection[str]) -> None:
        """A backward has left gradients that are not summed yet; the program sees those that the ranks keep whole.

        used: the parameters that have one.
        """
        for name, parameter in self._parameters.items():
            if parameter.grad is None and name in used:
                parameter.grad = self._withheld(name, _NOT_SUMMED)
            self._shown[name] = parameter.grad

    def resume(self) -> None:
        """Backwards add to the pending gradients again. Raises TrainingError where the program has replaced one."""
        for name, shown in self._shown.items():
            if self._parameters[name].grad is not shown:
                raise self._lost(name, _NOT_SUMMED)
        self.forget()

    def forget(self) -> None:
        """Take away what stands in the place of gradients."""
        for name in self._shown:
            if isinstance(self._parameters[name].grad, Withheld):
                self._parameters[name].grad = None
        self._shown.clear()

    @torch.no_grad()
    def take(self) -> set[str]:
        """Bring what the program has written into the pieces; the parameters whose gradient it has dropped, which is None there.

        Raises TrainingError for a new gradient in the place of one that is in parts.
        """
        dropped = set()
        for name, shown in self._shown.items():
            parameter, parts = self._parameters[name], self._of.get(name, [])
            now = parameter.grad
            if now is None:
                dropped.add(name)
                for part in parts:
                    part.grad = None
            elif isinstance(shown, Withheld) and now is not shown:
                raise self._lost(name, _IN_PARTS)
            elif not isinstance(now, Withheld) and parts and parts[0] is not parameter:
                if isinstance(now, DTensor) and isinstance(parameter, DTensor):
                    now = now.redistribute(placements=parameter.placements).to_local()
                parts[0].grad = now  # the same memory, unless it is another tensor
        return dropped

    def drop(self) -> None:
        """There are none until the next backward."""
        for parameter in [*self._parameters.values(), *(piece.tensor for piece in self._pieces)]:
            parameter.grad = None
        self._shown.clear()

    def _withheld(self, name: str, why: str) -> Withheld:
        return Withheld(self._parameters[name], f"the gradient of {name} in the model {self._name!r} {why}")

    def _lost(self, name: str, why: str) -> TrainingError:
        return TrainingError(f"the program has replaced the gradient of {name} in the model {self._name!r}, which {why}")


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """The tensor that is on this rank `local`, laid out as the parameter."""
    if not isinstance(parameter, DTensor):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
