"""Decides which checkpoints of a run stay on disk."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.base.errors import CheckpointError, reason
from hpctrain.checkpoint.directory import step_of

LOG = logging.getLogger("hpctrain")
EVALUATION_LOSS = "evaluation_loss"
"""The key of the evaluation loss in a checkpoint's values; absent if its step was not evaluated."""
EVALUATION_METRICS = "evaluation_metrics"
"""The key of the other values that its evaluation measured, by name."""


@dataclass(frozen=True)
class Best:
    """The number of best checkpoints, and the metric that ranks them: "loss" is the evaluation loss."""

    count: int
    metric: str = "loss"
    highest: bool = False

    def cost(self, values: dict[str, Any]) -> float:
        """The cost of a checkpoint with these values, the lower the better; infinite unless the metric is a number in them."""
        metrics = values.get(EVALUATION_METRICS)
        others = metrics if isinstance(metrics, dict) else {}  # another program may have written the file
        value = values.get(EVALUATION_LOSS) if self.metric == "loss" else others.get(self.metric)
        if not isinstance(value, (int, float)) or math.isnan(value):  # NaN can't be sorted
            return math.inf
        return -float(value) if self.highest else float(value)


@dataclass
class Retention:
    """Keeps the `newest` checkpoints, those whose step is a multiple of `every`, and the `best` by evaluation.

    Without any of the three, all stay; with one of the others alone, `newest` is 1. A checkpoint whose step was not evaluated
    is never one of the best.
    """

    newest: int | None = None
    every: int | None = None
    best: Best | None = None
    _costs: dict[Path, float] = field(default_factory=dict)

    def saved(self, path: Path, values: dict[str, Any]) -> None:
        """Remember the cost of a checkpoint that was just saved."""
        if self.best is not None:
            self._costs[path] = self.best.cost(values)

    def staying(
        self, read_values: Callable[[Path], dict[str, Any]], candidates: Sequence[Path], abandoned: set[str]
    ) -> tuple[set[Path], Path | None]:
        """The `candidates` to keep, and the best one; None if none was evaluated, or without `best`.

        Candidates come newest first, `abandoned` ones last; the latter count for `newest` alone. `read_values` is called once for
        each checkpoint of earlier starts.
        """
        if self.newest is None and self.every is None and self.best is None:
            return set(candidates), None
        stay = set(candidates[: self.newest or 1])  # at least one, to resume from
        current = [path for path in candidates if path.name not in abandoned]
        if self.every is not None:
            stay |= {path for path in current if step_of(path) % self.every == 0}
        if self.best is None:
            return stay, None
        # the later of equals comes first
        ranked = sorted((self._cost_of(path, self.best, read_values), -step_of(path), path) for path in current)
        leading = [path for cost, _, path in ranked[: self.best.count] if cost < math.inf]
        return stay | {*leading}, next(iter(leading), None)

    def _cost_of(self, path: Path, best: Best, read_values: Callable[[Path], dict[str, Any]]) -> float:
        if path not in self._costs:
            try:
                self._costs[path] = best.cost(read_values(path))
            except (CheckpointError, OSError) as error:
                LOG.warning("checkpoint %s has no evaluation that can be read: %s", path, reason(error))
                self._costs[path] = math.inf
        return self._costs[path]
