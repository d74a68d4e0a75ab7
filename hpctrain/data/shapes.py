"""Refuses micro batches of several shapes where an axis takes one only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from hpctrain.base.errors import TrainingError
from hpctrain.contracts.model import Batch
from hpctrain.job.parts import Parts
from hpctrain.job.tables import Job


def axis_of_one_shape(job: Job, parts: Parts) -> str | None:
    """The name of an axis that takes micro batches of one shape only."""
    for name, plugin in parts.parallelism.items():
        when = plugin.traits.one_shape
        if when == "always" or (when == "compiled" and job.compile.enabled):
            return name
    return None


class OneShape:
    """Cuts this rank's part out of micro batches, all of the shape of the first: a stage that waits for another shape hangs."""

    def __init__(self, split: Callable[[Batch], Batch], axis: str) -> None:
        self._split, self._axis = split, axis
        self._first: list[tuple[int, ...]] | None = None

    def __call__(self, batch: Batch) -> Batch:
        """Raises TrainingError for another shape."""
        found = _shapes(batch)
        if self._first is None:
            self._first = found
        elif found != self._first:
            raise TrainingError(
                f"[parallelism] {self._axis} takes micro batches of one shape, found {self._first} and {found}; pad every sample "
                "to one length"
            )
        return self._split(batch)


def _shapes(value: Any) -> list[tuple[int, ...]]:
    if isinstance(value, Tensor):
        return [tuple(value.shape)]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [shape for one in inner for shape in _shapes(one)]
