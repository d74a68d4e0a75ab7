"""Saves of a run: when the loop saves, what a checkpoint holds, and what a failed save means. All functions are collective."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.base.errors import CheckpointError, TrainingError, reason
from hpctrain.base.json_values import encode
from hpctrain.base.safe_files import CHECKPOINTS
from hpctrain.checkpoint.directory import step_of
from hpctrain.checkpoint.retention import EVALUATION_LOSS, EVALUATION_METRICS, Best, Retention
from hpctrain.checkpoint.state import SOURCE, TIED
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.contracts.life_cycle import PluginState
from hpctrain.contracts.pieces import State
from hpctrain.job.parts import Parts
from hpctrain.job.tables import Job
from hpctrain.ranks.json_collectives import together, world_group
from hpctrain.training.model_state import optimizer_to_save, pieces_to_save, state_of_model, values_to_save
from hpctrain.training.session import Session


def open_store(job: Job, parts: Parts, device: torch.device) -> CheckpointStore:
    """The checkpoints in the job's directory."""
    table = job.checkpoint
    behind = dist.new_group() if table.asynchronous else None  # a thread must not share the loop's group
    assert not isinstance(behind, int)  # torch returns an int on ranks that are not in the group
    kept = table.keep_best
    best = None if kept is None else Best(kept.count, kept.metric, kept.mode == "max")
    return CheckpointStore(
        job.output_dir.absolute() / CHECKPOINTS, parts.checkpoint, parts.formats, world_group(), background_group=behind,
        retention=Retention(table.keep, table.keep_every, best), device=device,
    )  # fmt: skip


def save_if_due(session: Session, stop_agreed: bool, asked: bool = False) -> bool:
    """Save if due, at the end, and if asked to stop or to save. Return whether it was due.

    The result of a background save is reported at the first step after it has ended.
    """
    progress, table = session.progress, session.job.checkpoint
    final = stop_agreed or progress.done or asked  # the process may end behind it: never in the background
    if progress.ended and not session.control.saves and not asked:
        finish_saving(session, excused=True)
        return False
    is_nth = bool(table.every_steps) and progress.step % table.every_steps == 0
    due = final or is_nth or progress.completes(session.feed.samples_of(table.every_epochs))
    excused = table.on_error == "continue"
    if due or session.store.is_over():
        with session.hooks.position.inside("save", progress.step):
            finish_saving(session, excused or final)  # a failure of the previous save doesn't prevent the final one
    if due:
        with _failures(session, progress.step, excused and not final):
            session.deadline.save_begins()
            with session.deadline.aside(), session.hooks.phase("save", progress.step):
                _save(session, final)
            if final or not table.asynchronous:
                session.deadline.saved()
    return due


def _save(session: Session, final: bool) -> None:
    """Save this step; in the background if the job says so and the save isn't `final`."""
    model, step = session.model, session.progress.step
    for one in session.models:
        one.sums.consolidate()  # what compression remembers, as a resumed run gets it
        one.consolidate()
    optimizer, idle = optimizer_to_save(model)
    states = plugin_states(session)
    values = {**_values(session, states), **values_to_save(model, optimizer, idle)}
    state = State(pieces_to_save(model, optimizer, states), values)
    if session.job.checkpoint.asynchronous and not final:
        session.store.save_in_background(step, state)
    else:
        _note(session, session.store.save(step, state))


def finish_saving(session: Session, excused: bool) -> None:
    """Wait for a background save. Its failure is printed if `excused`; otherwise it ends the training."""
    with _failures(session, session.store.background_step, excused):
        path = session.store.finish()
        if path is not None:
            _note(session, path)
        session.deadline.saved()


@contextmanager
def _failures(session: Session, step: int, excused: bool) -> Iterator[None]:
    """A context in which a failed save is printed if `excused`, or else ends the training. Older checkpoints stay unchanged."""
    try:
        yield
    except (OSError, CheckpointError) as error:
        if not excused:
            message = f"step {step} could not be saved: {reason(error)} (newest checkpoint: {session.newest_checkpoint or 'none'})"
            raise TrainingError(message) from error
        session.report.say(f"step {step} could not be saved, training goes on: {reason(error)}")


def _note(session: Session, path: Path) -> None:
    """Tell plugins of a checkpoint that is complete."""
    together(world_group(), lambda: session.hooks.call("hpctrain_checkpoint_saved", step=step_of(path), path=path))


def plugin_states(session: Session) -> list[PluginState]:
    """The state of the guard, of life-cycle plugins, of the sharding strategy and of further models."""
    own = session.model.sharded.state()
    further = [state_of_model(name, model) for name, model in session.further.items()]
    return [*session.states, *([own] if own is not None else []), *further]


def _values(session: Session, states: Sequence[PluginState]) -> dict[str, Any]:
    """The small values of a checkpoint besides those of the first model."""
    model, progress = session.model, session.progress
    values: dict[str, Any] = {
        "samples_seen": progress.samples_seen,
        "samples_before": progress.samples_before,
        "steps": progress.steps,
        "loss": progress.loss if math.isfinite(progress.loss) else None,  # JSON has no nan
        "fingerprint": session.feed.data.fingerprint,
        "job": session.job.job.name,
        "layout": session.layout.axes,
    }
    stream = session.feed.stream_values()
    if stream is not None:
        values["stream"] = stream
    if states:
        values["plugins"] = {state.name: plain_values(state) for state in states}
    if model.tied:
        values[TIED] = model.tied
    if model.given:
        values[SOURCE] = model.source()
    if progress.evaluation is not None and progress.evaluation[0] == progress.step:
        metrics = dict(progress.evaluation[1])
        values[EVALUATION_LOSS], values[EVALUATION_METRICS] = metrics.pop("loss"), metrics
    return values


def plain_values(state: PluginState) -> dict[str, Any]:
    """The values of a plugin's state. Raises TrainingError for those that a checkpoint can't hold."""
    values = state.values()
    try:
        encode(values)
    except TypeError as error:
        raise TrainingError(f"the state {state.name!r} can't be saved: {error}") from error
    return values
