"""How far the training is."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Progress:
    """Where this run is on its way to step `steps`. Equal on all ranks."""

    steps: int
    step: int = field(default=0, init=False)
    """Optimizer steps that are done."""
    samples_seen: int = field(default=0, init=False)
    """The position of the next step in the order of the samples."""
    samples_before: int = field(default=0, init=False)
    """The position at which the newest step began."""
    first_step: int = field(default=0, init=False)
    """The step that this run went on from; 0 for a new one."""
    ended: bool = field(default=False, init=False)
    """Whether a plugin ended the run here."""
    evaluation: tuple[int, float] | None = field(default=None, init=False)
    """Step and loss of the newest evaluation."""

    def resume(self, step: int, samples_seen: int) -> None:
        """Go on from a checkpoint."""
        self.step = self.first_step = step
        self.samples_seen = samples_seen

    def advance(self, samples_seen: int) -> None:
        """A step is done; the next one begins at this position in the order of the samples."""
        self.step += 1
        self.samples_before, self.samples_seen = self.samples_seen, samples_seen

    @property
    def done(self) -> bool:
        """Whether the last step is behind, of the job or by a plugin's wish."""
        return self.ended or self.step >= self.steps
