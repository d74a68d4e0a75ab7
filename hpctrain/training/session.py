"""A job on this rank, as the loop uses it. Its parts know each other only through their arguments."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpctrain.base.errors import TrainingError
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
from hpctrain.training.guard.memory import advice, lack_of_memory, shortage
from hpctrain.training.meters.meters import Meters
from hpctrain.training.progress import Progress
from hpctrain.training.report import Report
from hpctrain.training.trained_model import TrainedModel

if TYPE_CHECKING:
    from hpctrain.training.guard.replicas import Replicas

LOG = logging.getLogger("hpctrain")


@contextmanager
def memory_explained(
    job: Job, parts: Parts, identity: Identity, device: torch.device, doing: str, has_batch: bool = True
) -> Iterator[None]:
    """A context in which a lack of memory becomes a TrainingError with a sentence.

    doing: what the rank is about, such as "in step 3". has_batch: whether there is a micro batch, so that a smaller one would help.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        lack = lack_of_memory(error)
        if lack is None:
            raise
        LOG.info("out of memory", exc_info=error)
        what = f"rank {identity.rank} on {identity.node} ran out of memory {doing}: {shortage(lack, device)}"
        raise TrainingError(f"{what}; {advice(job, parts, identity.size, device, has_batch)}") from error


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
    def newest_checkpoint(self) -> Path | None:
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

    def memory_explained(self, doing: str) -> AbstractContextManager[None]:
        """A context in which a lack of memory becomes a sentence. doing: what the rank is about."""
        return memory_explained(self.job, self.parts, self.identity, self.device, doing)

    def close(self) -> None:
        """End background work, and close rank 0's outputs."""
        self.feed.close()
        for model in self.models:
            model.sums.close()
        self.report.close()
