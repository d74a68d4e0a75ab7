"""A job on this rank, as the loop uses it. Its five parts know each other only through their arguments."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpctrain.contracts.identity import Identity
from hpctrain.contracts.life_cycle import Control
from hpctrain.guard.judging import Guard
from hpctrain.guard.replicas import Replicas
from hpctrain.job.parts import Parts
from hpctrain.job.tables import Job
from hpctrain.loop.deadline import Deadline
from hpctrain.loop.feed import Feed
from hpctrain.loop.progress import Progress
from hpctrain.loop.report import Report
from hpctrain.loop.saving import Saving
from hpctrain.loop.trained_model import TrainedModel
from hpctrain.plugins.life_cycle import LifeCycle


@dataclass(frozen=True)
class Session:
    """Made by loop/assembly.py."""

    job: Job
    parts: Parts
    hooks: LifeCycle
    identity: Identity
    device: torch.device
    progress: Progress
    model: TrainedModel
    feed: Feed
    report: Report
    saving: Saving
    control: Control
    guard: Guard
    deadline: Deadline
    replicas: Replicas | None
    """None where the job compares none."""

    def close(self) -> None:
        """End background work, and close rank 0's outputs."""
        self.feed.close()
        self.model.sums.close()
        self.report.close()
