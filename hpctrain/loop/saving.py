"""The checkpoints of a run: what it restores, when it saves, and what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hpctrain.checkpoint.retention import EVALUATION_LOSS
from hpctrain.checkpoint.state import (
    COMPRESSION,
    PLUGIN,
    create_state,
    group_numbers,
    group_options,
    model_pieces,
    optimizer_numbers,
    restore_group_numbers,
    restore_numbers,
    restore_quantized,
    state_pieces,
)
from hpctrain.checkpoint.store import CheckpointStore, Restored
from hpctrain.checkpoint.weights import TIED, load_weights
from hpctrain.contracts.identity import Identity
from hpctrain.contracts.life_cycle import PluginState
from hpctrain.contracts.pieces import Piece, State
from hpctrain.errors import CheckpointError, UsageError, shown
from hpctrain.exchange import sum_of, together
from hpctrain.job.parts import Parts
from hpctrain.job.tables import Job
from hpctrain.loop.feed import Feed
from hpctrain.loop.progress import Progress
from hpctrain.loop.report import Report
from hpctrain.loop.trained_model import TrainedModel
from hpctrain.mesh import Layout
from hpctrain.plugins.life_cycle import LifeCycle

_REQUIRED = ("samples_seen", "fingerprint", "precision", "optimizer_numbers")
"""The values that a training goes on with."""


_Number = Annotated[int, Field(gt=-(2**63), lt=2**63)] | float | bool | None


class _Values(BaseModel):
    """The values of a checkpoint that a resume uses."""

    model_config = ConfigDict(strict=True)

    samples_seen: int = Field(ge=0, lt=2**63)
    fingerprint: str
    precision: dict[str, Any]
    optimizer_numbers: dict[str, dict[str, _Number]]
    optimizer_groups: list[dict[str, _Number]] = []
    optimizer_begun: bool = True
    evaluation_loss: float | None = None
    plugins: dict[str, dict[str, Any]] = {}


class Saving:
    """Every method is collective over all ranks."""

    def __init__(
        self, job: Job, parts: Parts, identity: Identity, hooks: LifeCycle, layout: Layout,
        model: TrainedModel, feed: Feed, progress: Progress, report: Report,
    ) -> None:  # fmt: skip
        self._job, self._parts, self._hooks, self._layout = job, parts, hooks, layout
        self._model, self._feed, self._progress, self._report = model, feed, progress, report
        self._states: list[PluginState] = hooks.call("hpctrain_state", job=job, identity=identity)
        refuse_same_names(self._states)
        self.newest: Path | None = None
        """The newest checkpoint of this run."""
        self.step = 0
        """The step of the newest save in the background."""
        table, world_group = job.checkpoint, dist.group.WORLD
        assert world_group is not None
        self._group = world_group
        behind = dist.new_group() if table.asynchronous else None
        assert not isinstance(behind, int)  # torch's type for ranks that are not in the group
        self._store = CheckpointStore(
            job.output_dir.absolute() / "checkpoints", parts.checkpoint, parts.formats, table.keep,
            world_group, behind, table.keep_every, table.keep_best,
        )  # fmt: skip

    def restore(self, resume: str) -> None:
        """Bring model and progress to where a checkpoint left them, or to the beginning. `resume`: "auto", "never" or a path."""
        optimizer = self._model.optimizer
        self._made = group_options(optimizer)
        create_state(optimizer)
        # Also where nothing is restored: state that can't be saved is to be told before the first step.
        pieces, restored = together(self._group, lambda: self._pieces(optimizer)), None
        together(self._group, lambda: self._numbers(optimizer))
        if resume != "never":
            path = None if resume == "auto" else Path(resume)
            restored = self._store.restore(pieces, path, optional=(COMPRESSION, PLUGIN), required=_REQUIRED)
        if restored is None:
            self._begin_anew()
        else:
            self._go_on(restored, pieces)

    def _go_on(self, restored: Restored, pieces: list[Piece]) -> None:
        model, values = self._model, restored.values
        _check_values(restored)
        if values["fingerprint"] != self._feed.fingerprint:
            raise CheckpointError(
                f"{restored.path} was trained on other data (dataset fingerprint {shown(values['fingerprint'])}, found "
                f"{self._feed.fingerprint}); restore the data, or start anew in another output_dir"
            )
        self._progress.resume(restored.step, values["samples_seen"])
        if EVALUATION_LOSS in values:
            self._progress.evaluation = restored.step, values[EVALUATION_LOSS]
        model.scaler.restore(values["precision"])
        for state in self._states:
            if state.name in values.get("plugins", {}):
                state.restore(values["plugins"][state.name])
        restore_quantized(model.pieces, model.optimizer, pieces)
        together(self._group, lambda: self._restore_numbers(values))
        model.optimizer_begun = values.get("optimizer_begun", True)
        if not model.optimizer_begun:
            model.optimizer = model.new_optimizer()
        model.sharded.refresh()
        self.newest = _shown(restored.path)
        self._tell_of_absent(restored.absent)

    def _restore_numbers(self, values: dict[str, Any]) -> None:
        optimizer = self._model.optimizer
        restore_numbers(self._model.pieces, optimizer, values["optimizer_numbers"])
        restore_group_numbers(optimizer, self._made, values.get("optimizer_groups", []))

    def _begin_anew(self) -> None:
        model = self._model
        model.optimizer = model.new_optimizer()  # without the state that was made to be filled
        weights = self._job.model.weights
        if weights is not None:
            pieces = model_pieces(model.module, model.pieces)
            load_weights(weights, self._parts.formats, pieces, self._group, model.tied)
            model.sharded.refresh()

    def _tell_of_absent(self, names: list[str]) -> None:
        """What compression and plugins remember may not be in the checkpoint: that was saved without, or with another."""
        for prefix, what in ((COMPRESSION, "compression"), (PLUGIN, "plugins")):
            count = sum_of(sum(name.startswith(prefix) for name in names))
            if count:
                self._report.say(
                    f"{what:<12} {count} of its tensors are not in {self.newest}; they begin as in a new run"
                )

    def is_due(self) -> bool:
        """Whether the job asks for a checkpoint of this step."""
        progress, table = self._progress, self._job.checkpoint
        if table.every_steps and progress.step % table.every_steps == 0:
            return True
        period = table.every_epochs * self._feed.samples
        return period > 0 and progress.samples_seen // period > progress.samples_before // period

    def save(self, final: bool) -> None:
        """Save this step, in the background where the job says so and training goes on (it isn't `final`)."""
        model, step = self._model, self._progress.step
        model.sums.consolidate()
        model.consolidate()
        optimizer = model.optimizer
        if not model.optimizer_begun:  # all steps were left out; a resume looks for its tensors, and takes none
            optimizer = model.spare_optimizer()
            create_state(optimizer)
        state = State(self._pieces(optimizer), self._values(optimizer))
        if self._job.checkpoint.asynchronous and not final:
            self._store.save_in_background(step, state)
            self.step = step
        else:
            self._saved(self._store.save(step, state), step)

    def is_over(self) -> bool:
        """Whether a save in the background has ended on all ranks, well or not."""
        return self._store.is_over()

    def finish(self) -> None:
        """Wait for a save in the background, raising its error."""
        path = self._store.finish()
        if path is not None:
            self._saved(path, self.step)

    def _saved(self, path: Path, step: int) -> None:
        self.newest = _shown(path)
        together(self._group, lambda: self._hooks.call("hpctrain_checkpoint_saved", step=step, path=path))

    def _pieces(self, optimizer: torch.optim.Optimizer) -> list[Piece]:
        """All of a checkpoint's tensors on this rank."""
        model = self._model
        return [
            *state_pieces(model.module, model.pieces, optimizer),
            *(replace(piece, name=COMPRESSION + piece.name) for piece in model.sums.pieces()),
            *(replace(p, name=f"{PLUGIN}{state.name}/{p.name}") for state in self._states for p in state.pieces),
        ]

    def _numbers(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
        """The optimizer's state on this rank that is no tensor: by parameter, and by parameter group."""
        return optimizer_numbers(self._model.pieces, optimizer), group_numbers(optimizer, self._made)

    def _values(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        model, progress, (numbers, groups) = self._model, self._progress, self._numbers(optimizer)
        values = {
            "samples_seen": progress.samples_seen,
            "fingerprint": self._feed.fingerprint,
            "precision": model.scaler.state(),
            "optimizer_numbers": model.totals.merged(numbers),
            "optimizer_begun": model.optimizer_begun,
            "job": self._job.job.name,
            "layout": self._layout.axes,
        }
        if self._states:
            values["plugins"] = {state.name: state.values() for state in self._states}
        if any(groups):
            values["optimizer_groups"] = groups
        if model.tied:
            values[TIED] = model.tied
        if progress.evaluation is not None and progress.evaluation[0] == progress.step:
            values[EVALUATION_LOSS] = progress.evaluation[1]
        return values


def refuse_same_names(states: Sequence[PluginState]) -> None:
    """UsageError where two plugins keep their state under one name."""
    names = [state.name for state in states]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(
            f"[plugins]: two plugins keep state in checkpoints under the name {twice[0]!r}; expected names of their own: "
            "uninstall or block one of them"
        )


def _check_values(restored: Restored) -> None:
    """CheckpointError for values of a kind that no training saves."""
    try:
        _Values.model_validate(restored.values)
    except ValidationError as error:
        odd = dict.fromkeys(str(one["loc"][0]) for one in error.errors(include_url=False, include_input=False))
        raise CheckpointError(
            f"{restored.path}: its {', '.join(odd)} can't be what a training saved; take another with --resume PATH"
        ) from None


def _shown(path: Path) -> Path:
    """As a person at rank 0 would type it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
