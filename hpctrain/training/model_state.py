"""The state of a model in checkpoints. Those that a program trains besides its first one are kept under their names, as a plugin's
state is."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hpctrain.base.errors import CheckpointError
from hpctrain.checkpoint.state import (
    COMPRESSION,
    PLUGIN,
    create_state,
    group_numbers,
    optimizer_numbers,
    restore_group_numbers,
    restore_numbers,
    restore_quantized,
    state_pieces,
)
from hpctrain.contracts.life_cycle import PluginState
from hpctrain.contracts.pieces import Piece
from hpctrain.training.trained_model import TrainedModel


def pieces_to_save(model: TrainedModel, optimizer: torch.optim.Optimizer, states: Sequence[PluginState]) -> list[Piece]:
    """All tensors of a checkpoint on this rank."""
    return [
        *state_pieces(model.module, model.pieces, model.shapes, optimizer, model.given),
        *(replace(piece, name=COMPRESSION + piece.name) for piece in model.sums.pieces()),
        *(replace(p, name=f"{PLUGIN}{state.name}/{p.name}") for state in states for p in state.pieces),
    ]


def optimizer_to_save(model: TrainedModel) -> tuple[torch.optim.Optimizer, dict[str, bool]]:
    """The optimizer with state for every piece, and the parameters that it has not updated yet, all ranks': a resume expects their
    tensors, and does not use them. Collective."""
    optimizer = model.optimizer
    lacking = [piece for piece in model.pieces if not optimizer.state.get(piece.tensor)]
    if lacking:
        spare = model.spare_optimizer(lacking)
        create_state(spare)
        optimizer = copy.copy(optimizer)
        optimizer.state = defaultdict(dict, {**optimizer.state, **spare.state})
    return optimizer, model.totals.merged({piece.name: True for piece in lacking if optimizer.state.get(piece.tensor)})


_Number = Annotated[int, Field(gt=-(2**63), lt=2**63)] | float | bool | None


class ModelValues(BaseModel):
    """The small values of a model in a checkpoint."""

    model_config = ConfigDict(strict=True)

    precision: dict[str, Any]
    optimizer_numbers: dict[str, dict[str, _Number]]
    optimizer_groups: list[dict[str, _Number]] = []
    optimizer_begun: bool = True
    optimizer_idle: dict[str, bool] = {}
    """Parameters that the optimizer had not updated yet."""
    sharding: dict[str, Any] | None = None
    """The strategy's own, where they are not kept among the plugins'."""


def values_to_save(model: TrainedModel, optimizer: torch.optim.Optimizer, idle: dict[str, bool]) -> dict[str, Any]:
    """The `ModelValues`. optimizer, idle: of `optimizer_to_save`. Collective."""
    return {
        "precision": model.scaler.state(),
        "optimizer_numbers": model.totals.merged(optimizer_numbers(model.pieces, optimizer)),
        "optimizer_groups": group_numbers(optimizer, model.group_options),
        "optimizer_begun": model.optimizer_begun,
        "optimizer_idle": idle,
    }


def restore_model(model: TrainedModel, values: ModelValues, pieces: Sequence[Piece]) -> None:
    """Take over the values; the pieces are filled already. Raises CheckpointError for values of another optimizer."""
    model.scaler.restore(values.precision)
    restore_quantized(model.pieces, model.optimizer, pieces)
    restore_numbers(model.pieces, model.optimizer, values.optimizer_numbers)
    restore_group_numbers(model.optimizer, model.group_options, values.optimizer_groups)
    for piece in model.pieces:
        if piece.name in values.optimizer_idle:
            model.optimizer.state.pop(piece.tensor, None)
    model.optimizer_begun, model.mode = values.optimizer_begun, "eval"  # in which it was saved
    if not model.optimizer_begun:
        model.optimizer = model.new_optimizer()


def state_of_model(name: str, model: TrainedModel) -> PluginState:
    """The state of `model`, whose pieces and averages are consolidated and whose optimizer has its state or gets one of its own.
    Collective."""
    optimizer, idle = optimizer_to_save(model)
    own = model.sharded.state()
    pieces = pieces_to_save(model, optimizer, [] if own is None else [own])

    def values() -> dict[str, Any]:
        return {**values_to_save(model, optimizer, idle), "sharding": None if own is None else own.values()}

    def restore(saved: Mapping[str, Any]) -> None:
        try:
            read = ModelValues.model_validate(saved)
        except ValidationError:
            raise CheckpointError(
                f"the checkpoint's values of the model {name!r} can't come from a training; choose another with --resume PATH"
            ) from None
        if own is not None and read.sharding is not None:
            own.restore(read.sharding)
        restore_model(model, read, pieces)

    return PluginState(name, pieces, values, restore)
