"""The spread of measurements, as all benchmarks give it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Spread(NamedTuple):
    """The median of measurements, and the quartiles below and above it."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)
