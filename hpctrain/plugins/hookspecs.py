# mypy: disable-error-code="empty-body"
"""The pluggy hooks: one registration hook per slot, one for commands, and the life-cycle hooks. docs/plugins/ explains each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import click

    from hpctrain.contracts.activation_checkpointing import ActivationCheckpointing
    from hpctrain.contracts.checkpoint import CheckpointFormat
    from hpctrain.contracts.communicator import Communicator
    from hpctrain.contracts.compression import Compression
    from hpctrain.contracts.dataset import Dataset
    from hpctrain.contracts.identity import Identity
    from hpctrain.contracts.life_cycle import Control, Hook, LiveModel, Membership, PluginState, Request
    from hpctrain.contracts.logger import Logger
    from hpctrain.contracts.metric import Metric
    from hpctrain.contracts.model import Batch, ModelSpec
    from hpctrain.contracts.optimization import Optimizer, Schedule
    from hpctrain.contracts.parallelism import Parallelism
    from hpctrain.contracts.pipeline_schedule import PipelineSchedule
    from hpctrain.contracts.precision import Precision
    from hpctrain.contracts.profile import Profiler
    from hpctrain.contracts.scheduler import Scheduler
    from hpctrain.contracts.sharding import Sharding
    from hpctrain.job.tables import Job

PROJECT = "hpctrain"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class RegistrationHooks:
    """Called once when plugins are loaded; each returns the plugin classes of its slot.

    `hpctrain_command` is of no slot: the function of the entry point "command.NAME" is called when its command is used.
    """

    @hookspec
    def hpctrain_command(self) -> click.Command:
        """A command of hpctrain. Its module must not import torch, which the help would wait for: the function does."""

    @hookspec
    def hpctrain_parallelism(self) -> list[type[Parallelism]]:
        """Mesh axes besides the data axes."""

    @hookspec
    def hpctrain_pipeline_schedule(self) -> list[type[PipelineSchedule]]:
        """Schedules of pipelines."""

    @hookspec
    def hpctrain_sharding(self) -> list[type[Sharding]]:
        """Sharding strategies."""

    @hookspec
    def hpctrain_precision(self) -> list[type[Precision]]:
        """Precision modes."""

    @hookspec
    def hpctrain_activation_checkpointing(self) -> list[type[ActivationCheckpointing]]:
        """Activation checkpointing modes."""

    @hookspec
    def hpctrain_checkpoint(self) -> list[type[CheckpointFormat]]:
        """Checkpoint formats."""

    @hookspec
    def hpctrain_communicator(self) -> list[type[Communicator]]:
        """Communicators."""

    @hookspec
    def hpctrain_model(self) -> list[type[ModelSpec]]:
        """Models."""

    @hookspec
    def hpctrain_dataset(self) -> list[type[Dataset]]:
        """Datasets."""

    @hookspec
    def hpctrain_optimizer(self) -> list[type[Optimizer]]:
        """Optimizers."""

    @hookspec
    def hpctrain_schedule(self) -> list[type[Schedule]]:
        """Learning-rate schedules."""

    @hookspec
    def hpctrain_compression(self) -> list[type[Compression]]:
        """Gradient compressions."""

    @hookspec
    def hpctrain_logger(self) -> list[type[Logger]]:
        """Metric loggers."""

    @hookspec
    def hpctrain_hook(self) -> list[type[Hook]]:
        """Life-cycle hooks that a job turns on."""

    @hookspec
    def hpctrain_profile(self) -> list[type[Profiler]]:
        """Profilers."""

    @hookspec
    def hpctrain_metric(self) -> list[type[Metric]]:
        """Metrics of evaluations."""

    @hookspec
    def hpctrain_scheduler(self) -> list[type[Scheduler]]:
        """Schedulers that `hpctrain submit` sends jobs to."""


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
        """Called before the first step with what evaluations measure, such as "loss" and "accuracy", where a micro batch has
        told. Raise UsageError for a name that is not among them."""

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
        """The evaluation is over, also one that was cut short because the job has to stop: take back what
        `hpctrain_evaluation_start` has changed."""

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
