"""The tables [guard] and [watchdog]: what a run does about steps that fail, and about ranks that hang."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpctrain.job.table import Table


class LossSpikeTable(Table):
    """[guard] loss_spike = { ... }"""

    factor: float = Field(gt=1)
    """A loss is a spike if it is above this many times the median of the losses before it."""
    window: int = Field(default=50, ge=2, le=10_000)
    """How many losses the median is of; until there are as many, no loss is a spike."""
    action: Literal["stop", "skip", "rollback", "warn"] = "warn"
    """Reaction to a spike, before the update: as for non_finite, or a line on the screen."""


class GuardTable(Table):
    """[guard]"""

    non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """Reaction to a loss or gradient that is NaN or infinite (an overflow of fp16's loss scaling does not count): stop, leave
    the update out, or go back to the newest checkpoint and on with the samples that follow."""
    loss_spike: LossSpikeTable | None = None
    """Reaction to a loss far above the ones before it (default: none)."""
    oom: Literal["stop", "skip"] = "stop"
    """Reaction to a rank that runs out of memory in forward or backward: stop, or leave the update out on all ranks."""
    replica_check_every: int = Field(default=0, ge=0)
    """Interval in steps at which ranks that hold the same parameters compare them, and stop if they differ; 0 is never."""
    limit: int = Field(default=10, ge=1)
    """The most steps in a row to leave out, and the most rollbacks to one checkpoint; the next one stops the job."""

    @property
    def rolls_back(self) -> bool:
        """Whether any guard may go back to a checkpoint."""
        return "rollback" in (self.non_finite, self.loss_spike.action if self.loss_spike else None)

    @property
    def may_leave_out(self) -> bool:
        """Whether any guard may leave the update of a step out and train on."""
        spike = self.loss_spike.action if self.loss_spike else "warn"
        return self.non_finite != "stop" or spike in ("skip", "rollback") or self.oom == "skip"


class WatchdogTable(Table):
    """[watchdog]"""

    timeout_seconds: float | None = Field(default=None, gt=0, le=1e8)
    """Seconds that a phase of training may take, or a rank may be silent; then the job ends (exit 4) and says which rank waits
    where (default: 0.9 of timeout_seconds of [communicator])."""
