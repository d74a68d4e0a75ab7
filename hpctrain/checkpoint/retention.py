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
    """How many checkpoints are the best, and by what: the metric "loss" is the evaluation loss."""

    count: int
    metric: str = "loss"
    highest: bool = False

    def cost(self, values: dict[str, Any]) -> float:
        """The lower the better; infinite where the checkpoint has no such metric, or none that is a number."""
        measured = values.get(EVALUATION_METRICS)
        found = values.get(EVALUATION_LOSS) if self.metric == "loss" else None
        if self.metric != "loss" and isinstance(measured, dict):
            found = measured.get(self.metric)
        if not isinstance(found, (int, float)) or math.isnan(found):
            return math.inf
        return -float(found) if self.highest else float(found)


@dataclass
class Retention:
    """Keeps the `newest` checkpoints, those whose step is a multiple of `every`, and the `best` by evaluation.

    If none of the three is given, all stay; if only the others are given, `newest` is 1. A checkpoint whose step was not
    evaluated is never one of the best. `read_values` is called once for each checkpoint of earlier runs.
    """

    newest: int | None
    every: int | None
    best: Best | None
    read_values: Callable[[Path], dict[str, Any]]
    leading: Path | None = field(default=None, init=False)
    """The best of the candidates that `staying` was given last; None if none was evaluated, or without `best`."""
    _costs: dict[Path, float] = field(default_factory=dict)

    def saved(self, path: Path, values: dict[str, Any]) -> None:
        """Remember the cost of a checkpoint that was just saved."""
        self._costs[path] = self._cost(values)

    def staying(self, candidates: Sequence[Path], abandoned: set[str]) -> set[Path]:
        """The `candidates` to keep. These come newest first, `abandoned` ones last; abandoned ones count only for `newest`."""
        if self.newest is None and self.every is None and self.best is None:
            return set(candidates)
        stay = set(candidates[: self.newest or 1])
        own = [path for path in candidates if path.name not in abandoned]
        if self.every is not None:
            stay |= {path for path in own if step_of(path) % self.every == 0}
        if self.best is not None:
            ranked = sorted((self._cost_of(path), -step_of(path), path) for path in own)
            leading = [path for cost, _, path in ranked[: self.best.count] if cost < math.inf]
            self.leading = leading[0] if leading else None
            stay |= set(leading)
        return stay

    def _cost_of(self, path: Path) -> float:
        if path not in self._costs:
            try:
                self._costs[path] = self._cost(self.read_values(path))
            except (CheckpointError, OSError) as error:
                LOG.warning("checkpoint %s has no evaluation that can be read: %s", path, reason(error))
                self._costs[path] = math.inf
        return self._costs[path]

    def _cost(self, values: dict[str, Any]) -> float:
        return math.inf if self.best is None else self.best.cost(values)
