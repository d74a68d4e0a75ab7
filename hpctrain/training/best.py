"""The best evaluation of a run so far, for the screen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.job.tables import KeepBestTable


@dataclass
class BestSoFar:
    """The best evaluation so far, by the metric of [checkpoint] keep_best, else by the loss."""

    metric: str = "loss"
    higher: bool = False
    """Whether a higher value is better."""
    _found: tuple[float, int] | None = field(default=None, init=False)
    """The value and its step."""

    @classmethod
    def by(cls, keep: KeepBestTable | None) -> BestSoFar:
        """Compare as the job's table says."""
        return cls() if keep is None else cls(keep.metric, keep.mode == "max")

    def see(self, row: Mapping[str, Any]) -> None:
        """Take a row of metrics into account."""
        value, step = row.get(f"evaluation_{self.metric}"), row.get("step")
        if not isinstance(value, (int, float)) or not isinstance(step, int) or value != value:
            return
        if self._found is None or (value > self._found[0] if self.higher else value < self._found[0]):
            self._found = float(value), step

    def resume(self, metrics: Path) -> None:
        """Begin anew with the rows of a file metrics.jsonl; lines that are no rows are left out."""
        self._found = None
        with suppress(OSError), open(metrics, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if f'"evaluation_{self.metric}"' in line:
                    with suppress(ValueError, AttributeError, RecursionError):
                        self.see(json.loads(line))

    def words(self, with_step: bool = True) -> list[str]:
        """ "best 1.2345 (step 10)"; nothing before the first evaluation."""
        if self._found is None:
            return []
        value, step = self._found
        name = "" if self.metric == "loss" else f"{self.metric} "
        return [f"best {name}{value:.4f}" + (f" (step {step})" if with_step else "")]
