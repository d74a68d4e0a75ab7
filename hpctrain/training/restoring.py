"""The way back to a checkpoint: a resume, a rollback, and the checks of what was saved. All functions are collective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hpctrain.base.errors import CheckpointError, UsageError, shown
from hpctrain.checkpoint.retention import EVALUATION_LOSS, EVALUATION_METRICS
from hpctrain.checkpoint.state import (
    COMPRESSION,
    create_state,
    restore_group_numbers,
    restore_numbers,
    restore_quantized,
)
from hpctrain.checkpoint.store import Restored
from hpctrain.checkpoint.weights import PLUGIN, OtherModelError, refuse_other_source
from hpctrain.contracts.life_cycle import PluginState
from hpctrain.contracts.pieces import Piece
from hpctrain.ranks.json_collectives import sum_of, together, world_group
from hpctrain.training.model_state import forget_idle, numbers_to_save, pieces_to_save, refuse_absent
from hpctrain.training.saving import as_typed, plugin_states
from hpctrain.training.session import Session

_REQUIRED = ("samples_seen", "fingerprint", "precision", "optimizer_numbers")
"""The values that a resume needs."""


_Number = Annotated[int, Field(gt=-(2**63), lt=2**63)] | float | bool | None


class _ReaderPlace(BaseModel):
    """The place of a reader of a stream."""

    model_config = ConfigDict(strict=True, extra="forbid")

    epoch: int = Field(ge=0, lt=2**63)
    items: int = Field(ge=0, lt=2**63)
    state: str | None


class _StreamPlaces(BaseModel):
    """The places of the readers of a stream."""

    model_config = ConfigDict(strict=True)

    shards: int = Field(ge=1)
    places: list[_ReaderPlace] = Field(min_length=1)


class _Values(BaseModel):
    """The values of a checkpoint that a resume uses."""

    model_config = ConfigDict(strict=True)

    samples_seen: int = Field(ge=0, lt=2**63)
    samples_before: int = Field(default=0, ge=0, lt=2**63)
    steps: int | None = Field(default=None, ge=1, lt=2**63)
    fingerprint: str
    precision: dict[str, Any]
    optimizer_numbers: dict[str, dict[str, _Number]]
    optimizer_groups: list[dict[str, _Number]] = []
    optimizer_begun: bool = True
    optimizer_idle: dict[str, bool] = {}
    loss: float | None = None
    evaluation_loss: float | None = None
    evaluation_metrics: dict[str, float] = {}
    plugins: dict[str, dict[str, Any]] = {}
    stream: _StreamPlaces | None = None


def restore(session: Session, resume: str) -> None:
    """Restore model and progress from a checkpoint, or start from the beginning. resume: "auto", "never" or a path."""
    model, group = session.model, world_group()
    for one in session.models:
        create_state(one.optimizer)
    states = plugin_states(session)
    refuse_same_names(states)
    # Also if nothing is restored: state that can't be saved must be reported before the first step.
    pieces, restored = together(group, lambda: pieces_to_save(model, model.optimizer, states)), None
    together(group, lambda: numbers_to_save(model, model.optimizer))
    if resume != "never":
        restored = _read(session, pieces, None if resume == "auto" else Path(resume))
    if restored is None:
        _begin_anew(session)
    else:
        _go_on(session, restored, pieces, states)


def roll_back(session: Session) -> None:
    """Make model, optimizer and state of plugins those of the newest checkpoint; the samples go on. Raises CheckpointError if it
    has gone bad."""
    model, progress = session.model, session.progress
    for one in session.models:
        one.optimizer = one.new_optimizer()
        create_state(one.optimizer)
        one.sums.consolidate()  # the state of compression is one rank's in a checkpoint, and zero on the others
    states = plugin_states(session)
    pieces = together(world_group(), lambda: pieces_to_save(model, model.optimizer, states))
    restored = _read(session, pieces, session.saved.newest)
    assert restored is not None  # a path is given
    _check_values(restored)
    loss = restored.values.get("loss")
    progress.go_back(restored.step, math.nan if loss is None else loss)
    _take_over(session, restored, pieces, states)
    if session.job.job.epochs is not None:
        progress.steps = progress.step + session.feed.steps_from(progress.samples_seen)
    session.report.go_back(session.job.output_dir, session.parts.loggers, progress.step)


def _read(session: Session, pieces: list[Piece], path: Path | None) -> Restored | None:
    """Fill the pieces from a checkpoint; None if there is none. path: None takes the newest that is whole."""
    restored = session.store.restore(pieces, path, optional=(COMPRESSION, PLUGIN), required=_REQUIRED)
    if restored is not None:
        check = partial(refuse_other_source, restored.path, session.parts.formats, session.model.source())
        together(world_group(), check)
    return restored


def _begin_anew(session: Session) -> None:
    model, table = session.model, session.job.model
    for one in session.models:
        one.optimizer = one.new_optimizer()  # drops the state that was created for a restore
    if table.weights is not None:
        try:
            remarks = model.load(table.weights, world_group(), strict=table.weights_strict)
        except OtherModelError as error:
            raise CheckpointError(f"{error}; [model] weights_strict = false takes those that fit") from error
        for remark in remarks:
            session.report.say(f"weights      {table.weights}: {remark}")


def _go_on(session: Session, restored: Restored, pieces: list[Piece], states: Sequence[PluginState]) -> None:
    values, feed, progress = restored.values, session.feed, session.progress
    _check_values(restored)
    if values["fingerprint"] != feed.fingerprint:
        raise CheckpointError(
            f"{restored.path} was trained on other data (dataset fingerprint {shown(values['fingerprint'])}, found "
            f"{feed.fingerprint}); restore the data, or start anew in another output_dir"
        )
    before = values.get("samples_before", values["samples_seen"])
    loss = values.get("loss")
    progress.resume(restored.step, values["samples_seen"], before, math.nan if loss is None else loss)
    progress.steps_before = values.get("steps")
    refuse_absent(list(session.further), restored.absent, restored.path)
    _take_over(session, restored, pieces, states)
    _tell_of_absent(session, restored.absent)
    told = feed.restore_stream(values.get("stream"))
    if told:
        session.report.say(f"{'data':<12} {told}")


def _take_over(session: Session, restored: Restored, pieces: list[Piece], states: Sequence[PluginState]) -> None:
    """Take over a checkpoint's values but the place in the data; its tensors are in `pieces` already."""
    model, progress, values = session.model, session.progress, restored.values
    progress.evaluation = None
    if EVALUATION_LOSS in values:
        progress.evaluation = (
            restored.step,
            {"loss": values[EVALUATION_LOSS], **values.get(EVALUATION_METRICS, {})},
        )
    model.scaler.restore(values["precision"])
    for state in states:
        if state.name in values.get("plugins", {}):
            state.restore(values["plugins"][state.name])
    restore_quantized(model.pieces, model.optimizer, pieces)

    def restore_optimizer() -> None:
        restore_numbers(model.pieces, model.optimizer, values["optimizer_numbers"])
        restore_group_numbers(model.optimizer, model.group_options, values.get("optimizer_groups", []))

    together(world_group(), restore_optimizer)
    forget_idle(model, values.get("optimizer_idle", ()))
    model.optimizer_begun = values.get("optimizer_begun", True)
    if not model.optimizer_begun:
        model.optimizer = model.new_optimizer()
    for one in session.models:
        one.sharded.refresh()
    session.saved.newest = as_typed(restored.path)


def _tell_of_absent(session: Session, names: list[str]) -> None:
    """Report state of compression and plugins that the checkpoint lacks: it was saved without them, or with others."""
    for prefix, what in ((COMPRESSION, "compression"), (PLUGIN, "plugins")):
        count = sum_of(sum(name.startswith(prefix) for name in names))
        if count:
            session.report.say(
                f"{what:<12} {count} of its tensors are not in {session.saved.newest}; they begin as in a new run"
            )


def refuse_same_names(states: Sequence[PluginState]) -> None:
    """Raises UsageError if two plugins keep their state under one name."""
    names = [state.name for state in states]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(
            f"[plugins]: two plugins keep state in checkpoints under the name {twice[0]!r}; expected different names: "
            "uninstall or block one of them"
        )


def _check_values(restored: Restored) -> None:
    """Raises CheckpointError for values that no training could have saved."""
    try:
        _Values.model_validate(restored.values)
    except ValidationError as error:
        odd = dict.fromkeys(str(one["loc"][0]) for one in error.errors(include_url=False, include_input=False))
        raise CheckpointError(
            f"{restored.path}: its {', '.join(odd)} can't come from a training; choose another with --resume PATH"
        ) from None
