"""The way back to a checkpoint: a resume, a rollback, and the checks of what was saved. All functions are collective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from hpctrain.base.errors import CheckpointError, UsageError, shown
from hpctrain.checkpoint.finding import refuse_other_source
from hpctrain.checkpoint.state import COMPRESSION, PLUGIN, create_state, group_numbers, optimizer_numbers
from hpctrain.checkpoint.store import Restored
from hpctrain.contracts.life_cycle import PluginState
from hpctrain.contracts.pieces import Piece
from hpctrain.data.batches import Place
from hpctrain.ranks.json_collectives import sum_of, together, world_group
from hpctrain.training.model_state import ModelValues, pieces_to_save, restore_model
from hpctrain.training.saving import plugin_states
from hpctrain.training.session import Session

# the values that a resume needs
_REQUIRED = ("samples_seen", "fingerprint", "precision", "optimizer_numbers")


class _StreamPlaces(BaseModel):
    """The places of the readers of a stream."""

    shards: int = Field(ge=1)
    places: list[Place] = Field(min_length=1)


class _Values(ModelValues):
    """The values of a checkpoint that a resume uses."""

    samples_seen: int = Field(ge=0, lt=2**63)
    samples_before: int | None = Field(default=None, ge=0, lt=2**63)
    steps: int | None = Field(default=None, ge=1, lt=2**63)
    fingerprint: str
    loss: float | None = None
    evaluation_loss: float | None = None
    evaluation_metrics: dict[str, float] = Field(default={})
    plugins: dict[str, dict[str, Any]] = Field(default={})
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
    together(group, lambda: optimizer_numbers(model.pieces, model.optimizer))
    together(group, lambda: group_numbers(model.optimizer, model.group_options))
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
    restored = _read(session, pieces, session.store.newest)
    assert restored is not None  # a path is given
    values = _checked_values(restored)
    progress.go_back(restored.step, math.nan if values.loss is None else values.loss)
    _take_over(session, restored, values, pieces, states)
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
        from hpctrain.checkpoint.weights import OtherModelError

        try:
            remarks = model.load(table.weights, strict=table.weights_strict)
        except OtherModelError as error:
            raise CheckpointError(f"{error}; [model] weights_strict = false takes those that fit") from error
        for remark in remarks:
            session.report.say(f"weights      {table.weights}: {remark}")


def _go_on(session: Session, restored: Restored, pieces: list[Piece], states: Sequence[PluginState]) -> None:
    values, feed, progress = _checked_values(restored), session.feed, session.progress
    if values.fingerprint != feed.data.fingerprint:
        raise CheckpointError(
            f"{restored.path} was trained on other data (dataset fingerprint {shown(values.fingerprint)}, found "
            f"{feed.data.fingerprint}); restore the data, or start anew in another output_dir"
        )
    before = values.samples_seen if values.samples_before is None else values.samples_before
    progress.resume(restored.step, values.samples_seen, before, math.nan if values.loss is None else values.loss)
    progress.steps_before = values.steps
    for name in session.further:  # whose training can't begin in the middle
        if any(one.startswith(f"{PLUGIN}{name}/") for one in restored.absent):
            raise CheckpointError(
                f"{restored.path} has no model {name!r}, which the program trains; train it in another output_dir, or give it "
                "the name that it had"
            )
    _take_over(session, restored, values, pieces, states)
    _tell_of_absent(session, restored.absent)
    stream = values.stream
    if stream is not None and (news := feed.restore_stream(stream.shards, stream.places)):
        session.report.say(f"{'data':<12} {news}")


def _take_over(
    session: Session, restored: Restored, values: _Values, pieces: list[Piece], states: Sequence[PluginState]
) -> None:
    """Take over a checkpoint's values but the place in the data; its tensors are in `pieces` already."""
    session.progress.evaluation = None
    if values.evaluation_loss is not None:
        metrics = {"loss": values.evaluation_loss, **values.evaluation_metrics}
        session.progress.evaluation = restored.step, metrics
    for state in states:
        if state.name in values.plugins:
            state.restore(values.plugins[state.name])
    together(world_group(), lambda: restore_model(session.model, values, pieces))
    for one in session.models:
        one.sharded.refresh()


def _tell_of_absent(session: Session, names: list[str]) -> None:
    """Report state of compression and plugins that the checkpoint lacks: it was saved without them, or with others."""
    for prefix, what in ((COMPRESSION, "compression"), (PLUGIN, "plugins")):
        count = sum_of(sum(name.startswith(prefix) for name in names))
        if count:
            session.report.say(
                f"{what:<12} {count} of its tensors are not in {session.newest_checkpoint}; they begin as in a new run"
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


def _checked_values(restored: Restored) -> _Values:
    """Raises CheckpointError for values that no training could have saved."""
    try:
        return _Values.model_validate(restored.values)
    except ValidationError as error:
        odd = dict.fromkeys(str(one["loc"][0]) for one in error.errors(include_url=False, include_input=False))
        raise CheckpointError(
            f"{restored.path}: its {', '.join(odd)} can't come from a training; choose another with --resume PATH"
        ) from None
