"""The checkpoints of a run: when to save, the tensors and values to save, and the restore."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hpctrain.checkpoint.retention import EVALUATION_LOSS, EVALUATION_METRICS, Best
from hpctrain.checkpoint.state import (
    COMPRESSION,
    create_state,
    group_numbers,
    group_options,
    optimizer_numbers,
    restore_group_numbers,
    restore_numbers,
    restore_quantized,
    state_pieces,
)
from hpctrain.checkpoint.store import CheckpointStore, Restored
from hpctrain.checkpoint.weights import PLUGIN, TIED, OtherModelError
from hpctrain.conformance.trials import refuse_lossy_scaler
from hpctrain.contracts.identity import Identity
from hpctrain.contracts.life_cycle import PluginState
from hpctrain.contracts.pieces import Piece, State
from hpctrain.errors import CheckpointError, TrainingError, UsageError, shown
from hpctrain.exchange import sum_of, together
from hpctrain.job.parts import Parts
from hpctrain.job.tables import Job
from hpctrain.json_values import encode
from hpctrain.loop.feed import Feed
from hpctrain.loop.progress import Progress
from hpctrain.loop.report import Report
from hpctrain.loop.trained_model import TrainedModel
from hpctrain.mesh import Layout
from hpctrain.plugins.life_cycle import LifeCycle

_REQUIRED = ("samples_seen", "fingerprint", "precision", "optimizer_numbers")
"""The values that a resume needs."""


_Number = Annotated[int, Field(gt=-(2**63), lt=2**63)] | float | bool | None


class _Place(BaseModel):
    """The place of a reader of a stream."""

    model_config = ConfigDict(strict=True, extra="forbid")

    epoch: int = Field(ge=0, lt=2**63)
    items: int = Field(ge=0, lt=2**63)
    state: str | None


class _Stream(BaseModel):
    """The places of the readers of a stream."""

    model_config = ConfigDict(strict=True)

    shards: int = Field(ge=1)
    places: list[_Place] = Field(min_length=1)


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
    loss: float | None = None
    evaluation_loss: float | None = None
    evaluation_metrics: dict[str, float] = {}
    plugins: dict[str, dict[str, Any]] = {}
    stream: _Stream | None = None


class Saving:
    """Every method is collective over all ranks."""

    def __init__(
        self, job: Job, parts: Parts, identity: Identity, hooks: LifeCycle, layout: Layout,
        model: TrainedModel, feed: Feed, progress: Progress, report: Report, own: Sequence[PluginState] = (),
    ) -> None:  # fmt: skip
        """own: state of the core that checkpoints keep as they keep a plugin's."""
        self._job, self._parts, self._hooks, self._layout = job, parts, hooks, layout
        self._model, self._feed, self._progress, self._report = model, feed, progress, report
        told = hooks.call("hpctrain_state", job=job, identity=identity, model=model)
        self._states: list[PluginState] = [*own, *told]
        self.newest: Path | None = None
        """The newest checkpoint of this run."""
        self.step = 0
        """The step of the newest background save."""
        self._saved_at = time.monotonic()
        table, world_group = job.checkpoint, dist.group.WORLD
        assert world_group is not None
        self._group = world_group
        behind = dist.new_group() if table.asynchronous else None
        assert not isinstance(behind, int)  # torch returns an int on ranks that are not in the group
        keep = table.keep_best
        best = None if keep is None else Best(keep.count, keep.metric, keep.mode == "max")
        self._store = CheckpointStore(
            job.output_dir.absolute() / "checkpoints", parts.checkpoint, parts.formats, table.keep,
            world_group, behind, table.keep_every, best,
        )  # fmt: skip

    def restore(self, resume: str) -> None:
        """Restore model and progress from a checkpoint, or start from the beginning. resume: "auto", "never" or a path."""
        optimizer = self._model.optimizer
        self._made = group_options(optimizer)
        create_state(optimizer)
        states = self._plugin_states()
        refuse_same_names(states)
        # Also if nothing is restored: state that can't be saved must be reported before the first step.
        pieces, restored = together(self._group, lambda: self._pieces(optimizer, states)), None
        together(self._group, lambda: self._numbers(optimizer))
        if resume != "never":
            path = None if resume == "auto" else Path(resume)
            restored = self._store.restore(pieces, path, optional=(COMPRESSION, PLUGIN), required=_REQUIRED)
        if restored is None:
            self._begin_anew()
        else:
            self._go_on(restored, pieces, states)

    def _go_on(self, restored: Restored, pieces: list[Piece], states: Sequence[PluginState]) -> None:
        values = restored.values
        _check_values(restored)
        if values["fingerprint"] != self._feed.fingerprint:
            raise CheckpointError(
                f"{restored.path} was trained on other data (dataset fingerprint {shown(values['fingerprint'])}, found "
                f"{self._feed.fingerprint}); restore the data, or start anew in another output_dir"
            )
        before = values.get("samples_before", values["samples_seen"])
        loss = values.get("loss")
        self._progress.resume(restored.step, values["samples_seen"], before, math.nan if loss is None else loss)
        self._progress.steps_before = values.get("steps")
        self._take_over(restored, pieces, states)
        self._tell_of_absent(restored.absent)
        told = self._feed.restore_stream(values.get("stream"))
        if told:
            self._report.say(f"{'data':<12} {told}")

    def roll_back(self) -> None:
        """Restore `newest` into the running job, all but the place in the data. Raises CheckpointError if it has gone bad."""
        model = self._model
        model.optimizer = model.new_optimizer()
        create_state(model.optimizer)
        model.sums.consolidate()  # the state of compression is one rank's in a checkpoint, and zero on the others
        states = self._plugin_states()
        pieces = together(self._group, lambda: self._pieces(model.optimizer, states))
        restored = self._store.restore(pieces, self.newest, optional=(COMPRESSION, PLUGIN), required=_REQUIRED)
        assert restored is not None  # a path is given
        _check_values(restored)
        loss = restored.values.get("loss")
        self._progress.go_back(restored.step, math.nan if loss is None else loss)
        self._take_over(restored, pieces, states)

    def _take_over(self, restored: Restored, pieces: list[Piece], states: Sequence[PluginState]) -> None:
        """All of a checkpoint's values but the place in the data; its tensors are in `pieces` already."""
        model, values = self._model, restored.values
        self._progress.evaluation = None
        if EVALUATION_LOSS in values:
            metrics = {"loss": values[EVALUATION_LOSS], **values.get(EVALUATION_METRICS, {})}
            self._progress.evaluation = restored.step, metrics
        model.scaler.restore(values["precision"])
        for state in states:
            if state.name in values.get("plugins", {}):
                state.restore(values["plugins"][state.name])
        restore_quantized(model.pieces, model.optimizer, pieces)
        together(self._group, lambda: self._restore_numbers(values))
        model.optimizer_begun = values.get("optimizer_begun", True)
        if not model.optimizer_begun:
            model.optimizer = model.new_optimizer()
        model.sharded.refresh()
        self.newest = _shown(restored.path)

    def _restore_numbers(self, values: dict[str, Any]) -> None:
        optimizer = self._model.optimizer
        restore_numbers(self._model.pieces, optimizer, values["optimizer_numbers"])
        restore_group_numbers(optimizer, self._made, values.get("optimizer_groups", []))

    def _begin_anew(self) -> None:
        model = self._model
        model.optimizer = model.new_optimizer()  # drops the state that was created for a restore
        table = self._job.model
        if table.weights is not None:
            try:
                remarks = model.load(table.weights, self._group, strict=table.weights_strict)
            except OtherModelError as error:
                raise CheckpointError(f"{error}; [model] weights_strict = false takes those that fit") from error
            for remark in remarks:
                self._report.say(f"weights      {table.weights}: {remark}")

    def _tell_of_absent(self, names: list[str]) -> None:
        """Report state of compression and plugins that the checkpoint lacks: it was saved without them, or with others."""
        for prefix, what in ((COMPRESSION, "compression"), (PLUGIN, "plugins")):
            count = sum_of(sum(name.startswith(prefix) for name in names))
            if count:
                self._report.say(
                    f"{what:<12} {count} of its tensors are not in {self.newest}; they begin as in a new run"
                )

    @property
    def seconds_unsaved(self) -> float:
        """Seconds since the newest save of this start, or since the start."""
        return time.monotonic() - self._saved_at

    def is_due(self) -> bool:
        """Whether the job asks for a checkpoint of this step."""
        progress, table = self._progress, self._job.checkpoint
        if table.every_steps and progress.step % table.every_steps == 0:
            return True
        return progress.completes(self._feed.samples_of(table.every_epochs))

    def save(self, final: bool) -> None:
        """Save this step; in the background if the job says so and the save isn't `final`."""
        model, step = self._model, self._progress.step
        model.sums.consolidate()
        model.consolidate()
        optimizer = model.optimizer
        if not model.optimizer_begun:  # all steps were skipped; a resume expects the tensors but does not use them
            optimizer = model.spare_optimizer()
            create_state(optimizer)
        states = self._plugin_states()
        state = State(self._pieces(optimizer, states), self._values(optimizer, states))
        if self._job.checkpoint.asynchronous and not final:
            self._store.save_in_background(step, state)
            self.step = step
        else:
            self._saved(self._store.save(step, state), step)

    def is_over(self) -> bool:
        """Whether a background save has ended on all ranks, successfully or not."""
        return self._store.is_over()

    def finish(self) -> None:
        """Wait for a background save; raises its error."""
        path = self._store.finish()
        if path is not None:
            self._saved(path, self.step)

    def _saved(self, path: Path, step: int) -> None:
        self.newest, self._saved_at = _shown(path), time.monotonic()
        together(self._group, lambda: self._hooks.call("hpctrain_checkpoint_saved", step=step, path=path))

    def _pieces(self, optimizer: torch.optim.Optimizer, states: Sequence[PluginState]) -> list[Piece]:
        """All tensors of a checkpoint on this rank."""
        model = self._model
        return [
            *state_pieces(model.module, model.pieces, optimizer),
            *(replace(piece, name=COMPRESSION + piece.name) for piece in model.sums.pieces()),
            *(replace(p, name=f"{PLUGIN}{state.name}/{p.name}") for state in states for p in state.pieces),
        ]

    def _plugin_states(self) -> list[PluginState]:
        """The state of life-cycle plugins and of the sharding strategy."""
        own = self._model.sharded.state()
        return [*self._states, *([own] if own is not None else [])]

    def _numbers(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
        """The optimizer's non-tensor state on this rank: by parameter, and by parameter group."""
        return optimizer_numbers(self._model.pieces, optimizer), group_numbers(optimizer, self._made)

    def _values(self, optimizer: torch.optim.Optimizer, states: Sequence[PluginState]) -> dict[str, Any]:
        model, progress, (numbers, groups) = self._model, self._progress, self._numbers(optimizer)
        values: dict[str, Any] = {
            "samples_seen": progress.samples_seen,
            "samples_before": progress.samples_before,
            "steps": progress.steps,
            "loss": progress.loss if math.isfinite(progress.loss) else None,
            "fingerprint": self._feed.fingerprint,
            "precision": self._scaler_state(),
            "optimizer_numbers": model.totals.merged(numbers),
            "optimizer_begun": model.optimizer_begun,
            "job": self._job.job.name,
            "layout": self._layout.axes,
        }
        stream = self._feed.stream_values()
        if stream is not None:
            values["stream"] = stream
        if states:
            values["plugins"] = {state.name: _plain(state) for state in states}
        if any(groups):
            values["optimizer_groups"] = groups
        if model.tied:
            values[TIED] = model.tied
        if progress.evaluation is not None and progress.evaluation[0] == progress.step:
            metrics = dict(progress.evaluation[1])
            values[EVALUATION_LOSS], values[EVALUATION_METRICS] = metrics.pop("loss"), metrics
        return values

    def _scaler_state(self) -> dict[str, Any]:
        refuse_lossy_scaler(self._parts.precision, self._model.scaler)
        return self._model.scaler.state()


def _plain(state: PluginState) -> dict[str, Any]:
    """The values of a plugin's state. Raises TrainingError for those that a checkpoint can't hold."""
    values = state.values()
    try:
        encode(values)
    except TypeError as error:
        raise TrainingError(f"the state {state.name!r} of a plugin can't be saved: {error}") from error
    return values


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


def _shown(path: Path) -> Path:
    """The path as a user at rank 0 would type it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
