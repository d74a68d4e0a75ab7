"""The gradients of a model as a program sees and changes them: `parameter.grad`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpctrain.base.errors import TrainingError
from hpctrain.base.torch_private import tensor_without_memory
from hpctrain.contracts.pieces import Piece, laid_out_like
from hpctrain.model.mesh import Meshes

_IN_PARTS = "is not whole on this rank; read and change it inside of `with loop.parameters(model) as parameters:`"
_NOT_SUMMED = "is summed in the backward of the step's last micro batch; read and change it after that"


class Withheld(Tensor):
    """A stand-in for a gradient that this rank does not have: any use of it raises TrainingError."""

    why: str

    @staticmethod
    def __new__(cls, parameter: Tensor, why: str) -> Withheld:
        stand_in: Withheld = tensor_without_memory(cls, parameter)
        stand_in.why = why
        return stand_in

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises TrainingError."""
        inputs = [*args, *(kwargs or {}).values()]
        flat = [value for each in inputs for value in (each if isinstance(each, (list, tuple)) else [each])]
        raise TrainingError(next(value.why for value in flat if isinstance(value, Withheld)))

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]  # operators that C++ calls come by this one only


class Gradients:
    """The gradients of this rank's pieces, and what the program sees of them.

    A parameter that is whole on this rank, in one piece, has that piece's gradient as its `grad`: changes to it hold. Any other
    parameter has a `Withheld` one. A DTensor in its place would mislead: the `item()` of its norm is that of this rank's part.
    """

    def __init__(
        self, name: str, parameters: Mapping[str, nn.Parameter], pieces: Sequence[Piece], meshes: Meshes
    ) -> None:
        """name: of the model. parameters: the trained ones as they are between steps."""
        self._name, self._parameters, self._pieces = name, parameters, pieces
        self._shown: dict[str, Tensor | None] = {}
        self._wholes = {
            piece.name: piece.tensor
            for piece in pieces
            if piece.tensor.shape == piece.shape
            # a rank may have all of it by chance, while another rank has nothing
            and all(meshes.group(axis, piece.axes).size() == 1 for axis in piece.axes)
        }

    @property
    def are_dropped(self) -> bool:
        """Whether the program has set all of them to None."""
        return bool(self._shown) and all(parameter.grad is None for parameter in self._parameters.values())

    def all(self) -> list[Tensor]:
        """Gradients, one for each piece: zeros where the program has dropped it."""
        return [piece.gradient() for piece in self._pieces]

    def show(self) -> None:
        """Let the program read and change the gradients: they are summed, or have changed."""
        for name, parameter in self._parameters.items():
            whole = self._wholes.get(name)
            if whole is None or whole.device != parameter.device:  # an offloaded piece's gradient lies in host memory
                parameter.grad = self._withheld(name, _IN_PARTS)
            elif whole is not parameter:  # the piece is a tensor of its own over the same memory
                parameter.grad = None if whole.grad is None else laid_out_like(parameter, whole.grad)
            self._shown[name] = parameter.grad

    def show_pending(self, used: Collection[str]) -> None:
        """Show the program the gradients that a backward has left, which are not summed yet: those that ranks keep whole.

        used: the parameters that have one.
        """
        for name, parameter in self._parameters.items():
            if parameter.grad is None and name in used:  # the strategy has taken it already, as stage 2 does
                parameter.grad = self._withheld(name, _NOT_SUMMED)
            self._shown[name] = parameter.grad

    def resume(self) -> None:
        """Let backwards add to the pending gradients again. Raises TrainingError where the program has replaced one."""
        for name, shown in self._shown.items():
            if self._parameters[name].grad is not shown:
                raise self._lost(name, _NOT_SUMMED)
        self.forget()

    def forget(self) -> None:
        """Remove the stand-ins of gradients."""
        for name in self._shown:
            if isinstance(self._parameters[name].grad, Withheld):
                self._parameters[name].grad = None
        self._shown.clear()

    @torch.no_grad()
    def take(self) -> set[str]:
        """Bring what the program has written into the pieces; returns the parameters whose gradient it has dropped.

        Raises TrainingError for a new gradient in place of one that is in parts.
        """
        dropped = set()
        for name, shown in self._shown.items():
            now, whole = self._parameters[name].grad, self._wholes.get(name)
            if now is None:
                dropped.add(name)
            elif isinstance(shown, Withheld):
                if now is not shown:
                    raise self._lost(name, _IN_PARTS)
            elif whole is not None and whole is not self._parameters[name]:
                whole.grad = now.full_tensor() if isinstance(now, DTensor) else now  # on meshes of one rank: no copy
        for piece in self._pieces:
            if piece.name in dropped:
                piece.tensor.grad = None
        return dropped

    def drop(self) -> None:
        """Drop all gradients until the next backward."""
        for parameter in [*self._parameters.values(), *(piece.tensor for piece in self._pieces)]:
            parameter.grad = None
        self._shown.clear()

    def _withheld(self, name: str, why: str) -> Withheld:
        return Withheld(self._parameters[name], f"the gradient of {name} in the model {self._name!r} {why}")

    def _lost(self, name: str, why: str) -> TrainingError:
        return TrainingError(
            f"the program has replaced the gradient of {name} in the model {self._name!r}, which {why}"
        )


def parameters_behind(loss: Tensor) -> list[nn.Parameter]:
    """The parameters to which a backward of the loss would add gradients. The time grows with the loss's graph."""
    visited, parameters = set[Any](), list[nn.Parameter]()
    waiting = [loss.grad_fn]  # no recursion: a graph is deeper than Python's stack
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        leaf = getattr(node, "variable", None)  # AccumulateGrad nodes have one
        if isinstance(leaf, nn.Parameter):
            parameters.append(leaf)
        waiting += [following for following, _ in node.next_functions]
    return parameters


def refuse_strangers(behind: Iterable[nn.Parameter], modules: Collection[nn.Module]) -> None:
    """Raises TrainingError if a backward has left a gradient in a parameter of none of the modules: nobody would sum it."""
    own = {id(parameter) for module in modules for parameter in module.parameters()}
    strangers = [parameter for parameter in behind if id(parameter) not in own and parameter.grad is not None]
    if strangers:
        shapes = ", ".join(str(tuple(stranger.shape)) for stranger in strangers[:3])
        raise TrainingError(
            f"backward: the loss follows from parameters that were not set up, of the shape {shapes}: their gradients would differ "
            "from rank to rank; give their module to loop.setup, or freeze it with requires_grad_(False)"
        )
