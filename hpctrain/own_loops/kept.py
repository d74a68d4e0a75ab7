"""Objects of a program in its checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hpctrain.base.errors import TrainingError, UsageError
from hpctrain.base.json_values import encode
from hpctrain.contracts.life_cycle import PluginState
from hpctrain.contracts.pieces import Piece
from hpctrain.own_loops.parameters import LaidOut

LOG = logging.getLogger("hpctrain")


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
    _refuse_value(name, stateful.state_dict())
    # copies: a state_dict may give new tensors each time, and pieces must be the same ones for as long as the run lasts
    tensors = {key: value.detach().clone() for key, value in stateful.state_dict().items() if isinstance(value, Tensor)}

    def values() -> dict[str, Any]:
        state = stateful.state_dict()
        late = next((key for key, value in state.items() if isinstance(value, Tensor) and key not in tensors), None)
        if late is not None:
            raise TrainingError(
                f"register_for_checkpointing: {late!r} of {name!r} is a tensor now and was none when the steps began; expected its "
                "tensor, of the shape that it has later, before steps()"
            )
        for key, tensor in tensors.items():
            if state[key].shape != tensor.shape:
                raise TrainingError(
                    f"register_for_checkpointing: {key!r} of {name!r} has the shape {tuple(state[key].shape)} now, and had "
                    f"{tuple(tensor.shape)} when the steps began; expected one shape"
                )
            tensor.copy_(state[key])
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
                    "setup got; keep it with loop.register_for_checkpointing(%s=...), given the model that setup returned",
                    model.name,
                    model.name if model.name.isidentifier() else "NAME",
                )
        return {}

    return PluginState("frozen models", values=values)


def _norms(model: LaidOut) -> list[float]:
    """The norm of each of the model's tensors on this rank: it differs after a change."""
    tensors = [piece.tensor.detach() for piece in model.pieces() if piece.tensor.numel()]
    dtypes = [torch.complex128 if tensor.is_complex() else torch.float64 for tensor in tensors]  # norms need floats
    norms = [torch.linalg.vector_norm(tensor.to(dtype)) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    return torch.stack(norms).tolist() if norms else []


def _refuse_value(name: str, state: dict[str, Any]) -> None:
    """Raises UsageError now for a value that the first save would refuse."""
    for key, value in state.items():
        try:
            encode(None if isinstance(value, Tensor) else value)
        except TypeError as error:
            raise UsageError(
                f"register_for_checkpointing: {key!r} of {name!r} can't be kept: {error}; expected tensors, numbers, texts, lists "
                "and dicts"
            ) from None
