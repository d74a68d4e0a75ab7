"""Which checkpoints of a run stay on disk."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.directory import step_of
from hpctrain.errors import CheckpointError, reason

LOG = logging.getLogger("hpctrain")
EVALUATION_LOSS = "evaluation_loss"
"""The value of a checkpoint whose step was evaluated."""


@dataclass
class Retention:
    """The `newest` ones stay, those whose step is a multiple of `every`, and the `best` by evaluation loss.

    All stay where none of the three is given; `newest` is 1 where only others are. A checkpoint whose step wasn't
    evaluated is never one of the best. `read_values` is asked once for each checkpoint of earlier runs.
    """

    newest: int | None
    every: int | None
    best: int | None
    read_values: Callable[[Path], dict[str, Any]]
    _losses: dict[Path, float] = field(default_factory=dict)

    def saved(self, path: Path, values: dict[str, Any]) -> None:
        """Remember the loss of a checkpoint that was saved just now."""
        self._losses[path] = _loss(values)

    def staying(self, candidates: Sequence[Path], abandoned: set[str]) -> set[Path]:
        """The ones to keep of `candidates`, newest first; `abandoned` ones, which are last, stay only as the newest."""
        if self.newest is None and self.every is None and self.best is None:
            return set(candidates)
        stay = set(candidates[: self.newest or 1])
        own = [path for path in candidates if path.name not in abandoned]
        if self.every is not None:
            stay |= {path for path in own if step_of(path) % self.every == 0}
        if self.best is not None:
            ranked = sorted((self._loss_of(path), -step_of(path), path) for path in own)
            stay |= {path for loss, _, path in ranked[: self.best] if loss < math.inf}
        return stay

    def _loss_of(self, path: Path) -> float:
        if path not in self._losses:
            try:
                self._losses[path] = _loss(self.read_values(path))
            except (CheckpointError, OSError) as error:
                LOG.warning("checkpoint %s has no evaluation loss that can be read: %s", path, reason(error))
                self._losses[path] = math.inf
        return self._losses[path]


def _loss(values: dict[str, Any]) -> float:
    """Infinite where there is none, or none that is a number."""
    loss = values.get(EVALUATION_LOSS, math.inf)
    return loss if isinstance(loss, float) and not math.isnan(loss) else math.inf
