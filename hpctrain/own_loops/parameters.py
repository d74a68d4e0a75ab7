"""Parameters and gradients of a model, for a program to read and change: whole, or as this rank has them; and what a program keeps
in checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.base.devices import seed_draws
from hpctrain.base.errors import TrainingError, UsageError
from hpctrain.base.random_numbers import derive_seed
from hpctrain.checkpoint.state import model_pieces
from hpctrain.contracts.life_cycle import PluginState
from hpctrain.contracts.pieces import Piece
from hpctrain.contracts.sharding import ShardedModel
from hpctrain.model.mesh import Meshes
from hpctrain.own_loops.trained import Trained
from hpctrain.training.over_ranks import FullParameters

LOG = logging.getLogger("hpctrain")


@dataclass(frozen=True)
class LaidOut:
    """A model that is set up, as the ranks have it. trained: None for a frozen one."""

    name: str
    sharded: ShardedModel
    meshes: Meshes
    trained: Trained | None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each parameter of the full model."""
        of_trained = {} if self.trained is None else self.trained.model.shapes
        parameters = self.sharded.module.named_parameters()
        return {name: of_trained.get(name, tuple(parameter.shape)) for name, parameter in parameters}

    def pieces(self) -> list[Piece]:
        """This rank's pieces of the parameters and buffers, live."""
        model = None if self.trained is None else self.trained.model
        return model_pieces(self.sharded.module, model.pieces if model else [], model.shapes if model else ())

    def named(self, pattern: str) -> list[str]:
        """The parameters that match, in the model's order. Raises UsageError if none does."""
        matching = [name for name in self.shapes if fnmatchcase(name, pattern)]
        if not matching:
            names = ", ".join(list(self.shapes)[:3])
            raise UsageError(
                f"parameters: no parameter of {self.name!r} matches {pattern!r}; names are like {names}, ..."
            )
        return matching


class Parameters:
    """Names and parameters, as `named_parameters` gives them; random numbers drawn at each depend on its place in the model."""

    def __init__(self, entries: Sequence[tuple[str, Tensor, tuple[int, ...]]], seed: int, device: torch.device):
        """entries: the name of each parameter or part, the tensor, and where it begins in the whole."""
        self._entries, self._seed, self._device = entries, seed, device

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter, offsets in self._entries:
            seed_draws(derive_seed(self._seed, name, offsets), self._device)
            yield name, parameter

    def __len__(self) -> int:
        return len(self._entries)


class WholeParameters:
    """Copies of whole parameters, and their way back into the pieces. Collective."""

    def __init__(
        self, model: LaidOut, names: Sequence[str], with_gradients: Collection[str], device: torch.device
    ) -> None:
        shapes = model.shapes
        self._pieces = parts_of(model, names)
        full = FullParameters(self._pieces, shapes, model.meshes, device)
        self.named: dict[str, nn.Parameter] = {}
        self._with_gradients = with_gradients
        trains: Mapping[str, Tensor] = dict(model.sharded.module.named_parameters())
        for name in names:  # in the same order on all ranks: each is gathered
            whole = full.of(name, lambda piece: piece.tensor)
            parameter = self.named[name] = nn.Parameter(whole, requires_grad=trains[name].requires_grad)
            if name in with_gradients:
                parameter.grad = full.of(name, Piece.gradient)

    def write_back(self) -> None:
        """Copy the values and gradients, as the program has left them, into this rank's pieces."""
        for piece in self._pieces:
            whole, tensor = self.named[piece.name], piece.tensor
            place = tuple(slice(at, at + n) for at, n in zip(piece.offsets, tensor.shape, strict=True))
            tensor.copy_(whole[place])
            if piece.name not in self._with_gradients:
                continue  # the copy has no gradient to bring back
            if whole.grad is None or tensor.grad is None:  # dropped by the program now, or before
                tensor.grad = None if whole.grad is None else whole.grad[place].to(tensor.device, copy=True)
            else:
                tensor.grad.copy_(whole.grad[place])


def parts_of(model: LaidOut, names: Collection[str]) -> list[Piece]:
    """This rank's pieces of the parameters with these names."""
    return [piece for piece in model.pieces() if piece.name in names]


def kept_state(name: str, stateful: Any) -> PluginState:
    """The state of an object with `state_dict` and `load_state_dict`: tensors as pieces, all else as JSON values. A frozen model's
    is its pieces.

    Raises UsageError for other objects. The tensors' names and shapes have to stay as they are now.
    """
    if isinstance(stateful, LaidOut):
        return PluginState(name, stateful.pieces(), restore=lambda _: stateful.sharded.refresh())
    if not (hasattr(stateful, "state_dict") and hasattr(stateful, "load_state_dict")):
        raise UsageError(
            f"register_for_checkpointing: {name!r} is of type {type(stateful).__name__}, expected state_dict and load_state_dict"
        )
    # copies: a state_dict may give new tensors each time, and pieces must be the same ones for as long as the run lasts
    tensors = {key: value.detach().clone() for key, value in stateful.state_dict().items() if isinstance(value, Tensor)}

    def values() -> dict[str, Any]:
        state = stateful.state_dict()
        for key in {**tensors, **state}:
            now, begun = (_shape(of.get(key)) for of in (state, tensors))
            if now != begun:  # it would be broadcast, or the checkpoint has no place for it
                raise TrainingError(
                    f"register_for_checkpointing: {key!r} of {name!r} has the shape {now} now, and had {begun} when the steps "
                    "began; expected tensors of one shape, which exist before steps()"
                )
            if key in tensors:
                tensors[key].copy_(state[key])
        return {"values": {key: value for key, value in state.items() if key not in tensors}}

    def restore(saved: dict[str, Any]) -> None:
        # clones: the object may keep the tensors that it gets, and the next save writes into the pieces
        stateful.load_state_dict({**saved["values"], **{key: tensor.clone() for key, tensor in tensors.items()}})

    return PluginState(name, [Piece.whole(key, tensor) for key, tensor in tensors.items()], values, restore)


def changed_models(models: Sequence[LaidOut]) -> PluginState:
    """State without values that warns, at each save, of frozen models that have changed since: no checkpoint has them."""
    before = {model.name: _norms(model) for model in models}

    def values() -> dict[str, Any]:
        for model in models:
            if model.name in before and _norms(model) != before[model.name]:
                del before[model.name]  # one warning for each model
                LOG.warning(
                    "the program has changed the frozen model %r, which checkpoints leave out: after a resume it is again what "
                    "setup got; give the model that setup returned to loop.register_for_checkpointing",
                    model.name,
                )
        return {}

    return PluginState("frozen models", values=values)


def _norms(model: LaidOut) -> list[float]:
    """The norm of each of the model's tensors on this rank: it differs after a change."""
    tensors = [piece.tensor.detach() for piece in model.pieces() if piece.tensor.numel()]
    dtypes = [torch.complex128 if tensor.is_complex() else torch.float64 for tensor in tensors]  # norms need floats
    norms = [torch.linalg.vector_norm(tensor.to(dtype)) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    return torch.stack(norms).tolist() if norms else []


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None
