# mypy: disable-error-code="empty-body"
"""The pluggy hooks of commands and of the life cycle, which docs/plugins/ explains. Registration hooks are those of `SLOTS`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import click

    from hpctrain.contracts.identity import Identity
    from hpctrain.contracts.life_cycle import Control, LiveModel, Membership, PluginState, Request
    from hpctrain.contracts.model import Batch
    from hpctrain.job.tables import Job

PROJECT = "hpctrain"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class CommandHook:
    """The function of the entry point "command.NAME" is called when its command is used."""

    @hookspec
    def hpctrain_command(self) -> click.Command:
        """A command of hpctrain. Its module must not import torch, which the help would wait for: the function does."""


class LifeCycleHooks:
    """Called on every rank, in the same order on all. An implementation may use torch.distributed collectives, except in
    `hpctrain_exception`, where some ranks may be gone."""

    @hookspec
    def hpctrain_state(self, job: Job, identity: Identity, model: LiveModel) -> PluginState | None:
        """The model is built, but nothing is restored yet. Returns the state that this plugin keeps in checkpoints."""

    @hookspec
    def hpctrain_job_start(
        self, job: Job, identity: Identity, step: int, model: LiveModel, control: Control, membership: Membership
    ) -> None:
        """Everything is built and restored; training begins after `step`, which is 0 in a new run."""

    @hookspec
    def hpctrain_measured(self, names: Sequence[str]) -> None:
        """Called before the first step with the names of what evaluations measure, such as "loss" and "accuracy", if a trial with
        a micro batch could tell them. Raise UsageError for a name that is not among them."""

    @hookspec
    def hpctrain_outputs(self, step: int, batch: Batch, outputs: Any) -> None:
        """A forward of the step after `step` is done: `outputs` of a micro batch, on the ranks that have them. Called before
        backward; must not change them, nor communicate."""

    @hookspec
    def hpctrain_step_end(self, step: int, metrics: dict[str, Any], model: LiveModel, control: Control) -> None:
        """Optimizer step `step` (1-based) is done. Keys added to `metrics` go into metrics.jsonl."""

    @hookspec
    def hpctrain_evaluation_start(self, step: int, model: LiveModel) -> None:
        """The model after `step` is about to be evaluated."""

    @hookspec
    def hpctrain_evaluation_end(self, step: int, model: LiveModel) -> None:
        """The evaluation is over, or was cut short because the job has to stop: undo what `hpctrain_evaluation_start` changed."""

    @hookspec
    def hpctrain_evaluation(self, step: int, metrics: dict[str, Any], model: LiveModel, control: Control) -> None:
        """The model was evaluated after `step`; `metrics` has `evaluation_loss`."""

    @hookspec
    def hpctrain_phase_begin(self, phase: str, step: int) -> None:
        """A phase of the step after `step` begins on this rank; docs/plugins/hook.md lists the phases."""

    @hookspec
    def hpctrain_phase_end(self, phase: str, step: int) -> None:
        """The phase is over, without an exception."""

    @hookspec
    def hpctrain_checkpoint_saved(self, step: int, path: Path) -> None:
        """The checkpoint of `step` is complete on disk."""

    @hookspec
    def hpctrain_request(self, request: Request, step: int, model: LiveModel) -> bool | None:
        """Another terminal asks something of the job, after `step`. Returns whether this plugin takes the request."""

    @hookspec
    def hpctrain_exception(self, exception: BaseException, identity: Identity) -> None:
        """Training failed on this rank; the implementation must not communicate."""

    @hookspec
    def hpctrain_job_end(self, result: Mapping[str, Any]) -> None:
        """Training is over without an exception; `result` has step, loss and exit_code."""
