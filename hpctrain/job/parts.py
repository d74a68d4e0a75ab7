"""The plugins that a job chose, made with their options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpctrain.contracts.activation_checkpointing import ActivationCheckpointing
from hpctrain.contracts.checkpoint import CheckpointFormat
from hpctrain.contracts.communicator import Communicator
from hpctrain.contracts.compression import Compression
from hpctrain.contracts.dataset import Dataset
from hpctrain.contracts.life_cycle import Hook, Profiler
from hpctrain.contracts.logger import Logger
from hpctrain.contracts.metric import Metric
from hpctrain.contracts.model import ModelSpec
from hpctrain.contracts.optimization import Optimizer, Schedule
from hpctrain.contracts.parallelism import Parallelism
from hpctrain.contracts.precision import Precision
from hpctrain.contracts.scheduler import Scheduler
from hpctrain.contracts.sharding import Sharding

__all__ = ["Parts"]


@dataclass(frozen=True)
class Parts:
    """The plugins of a job: one for each slot, `parallelism` by the axes' names in the job, and `loggers`, `hooks` and `metrics` in
    the job's order."""

    model: ModelSpec
    dataset: Dataset
    optimizer: Optimizer
    optimizer_groups: list[dict[str, Any]]
    """The groups of [[optimizer.groups]], each with `pattern` (a list), `max_dims` and its complete options."""
    schedule: Schedule
    parallelism: dict[str, Parallelism]
    sharding: Sharding
    precision: Precision
    activation_checkpointing: ActivationCheckpointing
    compression: Compression
    checkpoint: CheckpointFormat
    communicator: Communicator
    profile: Profiler
    loggers: list[Logger]
    hooks: list[Hook]
    metrics: list[Metric]
    scheduler: dict[str, Scheduler]
    """Schedulers by the name of their table in [scheduler]."""
    formats: list[CheckpointFormat]
    """Every installed checkpoint format: a run can continue from a checkpoint of any format."""
    communicators: list[Communicator]
    """Every installed communicator: the choices of `auto`."""
