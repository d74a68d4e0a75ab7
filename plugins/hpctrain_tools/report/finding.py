"""A limit of a run."""

from __future__ import annotations

from dataclasses import dataclass

STEPS = 5
"""Steps from which on shares of their time tell anything."""
WORKERS = 4
"""Processes for samples where a job has none."""
CHANGES = "; this changes the training"
"""Follows a step after which the losses are others."""


@dataclass(frozen=True)
class Finding:
    """rule: its name. limit: what limits the run. step: to try next, in the words of the job file or the shell; "" if none. cost:
    about the share of the time that it costs."""

    rule: str
    limit: str
    step: str
    cost: float

    @property
    def told(self) -> str:
        """The limit with its step."""
        return f"{self.limit}: {self.step}" if self.step else self.limit
