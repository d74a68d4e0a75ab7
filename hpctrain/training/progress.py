"""The progress of the training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Progress:
    """The position of this run on its way to step `steps`. Equal on all ranks."""

    steps: int
    step: int = field(default=0, init=False)
    """Completed optimizer steps."""
    samples_seen: int = field(default=0, init=False)
    """The position of the next step in the order of the samples."""
    samples_before: int = field(default=0, init=False)
    """The position at which the newest step began."""
    first_step: int = field(default=0, init=False)
    """The step that this run resumed from; 0 for a new run."""
    steps_before: int | None = field(default=None, init=False)
    """The last step of the job as the checkpoint's run knew it; None in a new run."""
    loss: float = field(default=math.nan, init=False)
    """The loss of the newest step."""
    ended: bool = field(default=False, init=False)
    """Whether a plugin ended the run here."""
    evaluation: tuple[int, dict[str, float]] | None = field(default=None, init=False)
    """Step and metrics of the newest evaluation."""

    def resume(self, step: int, samples_seen: int, samples_before: int, loss: float) -> None:
        """Continue from a checkpoint."""
        self.step, self.first_step, self.loss = step, step, loss
        self.samples_seen, self.samples_before = samples_seen, samples_before

    def go_back(self, step: int, loss: float) -> None:
        """The model is again as after `step` steps; the samples go on where they are."""
        self.step, self.first_step, self.loss = step, min(step, self.first_step), loss

    def advance(self, samples_seen: int) -> None:
        """A step is done; the next one begins at this position in the order of the samples."""
        self.step += 1
        self.samples_before, self.samples_seen = self.samples_seen, samples_seen

    def completes(self, samples: float) -> bool:
        """Whether the newest step has completed another so many samples; no step completes 0."""
        return samples > 0 and self.samples_seen // samples > self.samples_before // samples

    @property
    def done(self) -> bool:
        """Whether the job's last step is done, or a plugin has ended the run."""
        return self.ended or self.step >= self.steps
