"""The progress of the training: its position, the best evaluation so far, and figures of a step in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpctrain.base.errors import escaped
from hpctrain.job.tables import KeepBestTable

# seconds
_LONGEST = 1e9


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


@dataclass
class BestSoFar:
    """The best evaluation so far, by the metric of [checkpoint] keep_best, else by the loss."""

    metric: str = "loss"
    higher: bool = False
    """Whether a higher value is better."""
    # the value and its step
    _found: tuple[float, int] | None = field(default=None, init=False)

    @classmethod
    def by(cls, table: KeepBestTable | None) -> BestSoFar:
        """Compare as the job's table says."""
        return cls() if table is None else cls(table.metric, table.mode == "max")

    def see(self, row: Mapping[str, Any]) -> None:
        """Take a row of metrics into account."""
        value, step = row.get(f"evaluation_{self.metric}"), row.get("step")
        if not isinstance(value, (int, float)) or not isinstance(step, int) or value != value:
            return
        if self._found is None or (value > self._found[0] if self.higher else value < self._found[0]):
            self._found = float(value), step

    def forget(self) -> None:
        """Begin anew."""
        self._found = None

    def words(self, with_step: bool = True) -> list[str]:
        """ "best 1.2345 (step 10)"; nothing before the first evaluation."""
        if self._found is None:
            return []
        value, step = self._found
        name = "" if self.metric == "loss" else f"{self.metric} "
        return [f"best {name}{value:.4f}" + (f" (step {step})" if with_step else "")]


def duration(seconds: float) -> str:
    """ "1:02:03" """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def slowest_rank(row: Mapping[str, Any]) -> str:
    """ "slowest rank 5 on node2: data +0.31 s"; "" for a row that names none. The row may be from another person's file."""
    found = row.get("straggler")
    if not isinstance(found, Mapping) or not isinstance(found.get("rank"), int):
        return ""
    node, cause, excess = (found.get(key) for key in ("node", "cause", "excess_seconds"))
    text = f"slowest rank {found['rank']}" + (f" on {escaped(node)}" if isinstance(node, str) else "")
    told = [escaped(cause)] if isinstance(cause, str) else []
    told += [f"+{excess:.2f} s"] if isinstance(excess, (int, float)) and abs(excess) < _LONGEST else []
    return text + (f": {' '.join(told)}" if told else "")
