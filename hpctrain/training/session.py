"""A job on this rank, as the loop uses it. Its parts know each other only through their arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.contracts.identity import Identity
from hpctrain.contracts.life_cycle import Control, PluginState
from hpctrain.job.parts import Parts
from hpctrain.job.tables import Job
from hpctrain.model.mesh import Layout
from hpctrain.ranks.watchdog.queries import Queries
from hpctrain.registry.life_cycle import LifeCycle
from hpctrain.training.deadline import Deadline
from hpctrain.training.feed import Feed
from hpctrain.training.meters.meters import Meters
from hpctrain.training.progress import Progress
from hpctrain.training.report import Report
from hpctrain.training.trained_model import TrainedModel

if TYPE_CHECKING:
    from hpctrain.training.guard.replicas import Replicas


@dataclass(frozen=True)
class Session:
    """A job on this rank. Made by training/assembly.py."""

    job: Job
    parts: Parts
    identity: Identity
    device: torch.device
    layout: Layout
    hooks: LifeCycle
    report: Report
    model: TrainedModel
    feed: Feed
    store: CheckpointStore
    replicas: Sequence[Replicas]
    """Checks of each model, unless its ranks train parameters of their own."""
    deadline: Deadline
    states: Sequence[PluginState]
    """State that checkpoints keep: the guard's and that of life-cycle plugins."""
    progress: Progress
    meters: Meters
    further: Mapping[str, TrainedModel] = field(default_factory=dict)
    """Models that a program trains besides `model`, by their names."""
    control: Control = field(default_factory=Control)
    queries: Queries | None = None
    """Questions of other terminals; those of rank 0 count."""

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint of this run that is complete, as a user at rank 0 would type it."""
        path, here = self.store.newest, Path.cwd()
        return path.relative_to(here) if path is not None and path.is_relative_to(here) else path

    def schedule_place(self, model: TrainedModel) -> tuple[int, int]:
        """The place in the model's schedule, from 0, and its length: in steps or epochs, as [schedule] unit says."""
        done, epochs = self.progress, model.job.scheduled_epochs
        return (done.step, done.steps) if epochs is None else (int(self.feed.epochs(done.samples_seen)), epochs)

    @property
    def models(self) -> list[TrainedModel]:
        """All models that are trained."""
        return [self.model, *self.further.values()]

    def close(self) -> None:
        """End background work, and close rank 0's outputs."""
        self.feed.close()
        for model in self.models:
            model.sums.close()
        self.report.close()
