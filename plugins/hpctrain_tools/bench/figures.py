"""Figures of measurements: seconds and ratios, with their spread. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain_tools.bench import spread


@dataclass(frozen=True)
class Figure:
    """A measurement in seconds: the median, and the quartiles below and above."""

    seconds: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Figure:
        """The figure of at least one value."""
        return Figure(*spread(values))

    def __str__(self) -> str:
        return f"{self.seconds * 1e3:10,.2f} ms  ±{(self.high - self.low) * 500:,.2f}"


@dataclass(frozen=True)
class Ratio:
    """A ratio of paired turns: the median, and the quartiles below and above."""

    ratio: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Ratio:
        """The ratio over at least one pair."""
        return Ratio(*spread(values))

    def __str__(self) -> str:
        return f"x{self.ratio:.3f}  ({self.low:.3f} - {self.high:.3f})"
