"""What the loop works with: one job on this rank, in five parts that know nothing of each other but what they are given."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpctrain.contracts.identity import Identity
from hpctrain.contracts.life_cycle import Control
from hpctrain.job.parts import Parts
from hpctrain.job.tables import Job
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

    def close(self) -> None:
        """End what runs beside the loop, and close what rank 0 writes to."""
        self.model.sums.close()
        self.report.close()
