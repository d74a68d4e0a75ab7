"""Curves of block characters: a sparkline of one line, a chart of several."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

BLOCKS = " ▁▂▃▄▅▆▇█"
"""Eighths of a character, from below."""
# thirds, for outputs without these characters
_ASCII = " .:#"
# the first part of a curve, which does not count for the scale: a loss falls from far above all that follows
_STEEP = 0.1
_CAPACITY = 2048
# numbers beyond it count as not finite: sums of them may be
_LARGEST = 1e150


class Series:
    """A curve of at most `capacity` points, however many are added: neighbours become their mean when it is full."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._points: list[tuple[float, float]] = []

    def add(self, at: float, value: float | None) -> None:
        """Add a point behind all others. None is a value that was not finite."""
        self._points.append((at, value if value is not None and abs(value) < _LARGEST else math.nan))
        if len(self._points) > self._capacity:
            *pairs, last = self._points  # the newest stays as it is
            self._points = [*(_merged(pairs[first : first + 2]) for first in range(0, len(pairs), 2)), last]

    def __len__(self) -> int:
        return len(self._points)

    def cells(self, width: int) -> list[float]:
        """The curve in at most `width` parts of equal length, the mean of each; NaN where no value was finite."""
        if not self._points or width < 1:
            return []
        begin, end = self._points[0][0], self._points[-1][0]
        count = min(width, len(self._points))
        inside: list[list[float]] = [[] for _ in range(count)]
        for at, value in self._points:
            place = (at - begin) / (end - begin) if end > begin else 1.0
            inside[max(0, min(count - 1, int(place * count)))].append(value)
        found: list[float] = []
        for values in inside:
            found.append(_mean(values) if values else found[-1] if found else math.nan)
        return found


def _merged(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(at for at, _ in points) / len(points), _mean([value for _, value in points])


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if not math.isnan(value)]
    return sum(finite) / len(finite) if finite else math.nan


def sparkline(cells: Sequence[float], ascii_only: bool = False) -> str:
    """A character for each cell; "x" for NaN."""
    return next(chart(cells, 1, ascii_only))


def chart(cells: Sequence[float], height: int, ascii_only: bool = False) -> Iterator[str]:
    """Lines with a column for each cell, the uppermost first. The lowest value has the lowest mark, not none."""
    marks = _ASCII if ascii_only else BLOCKS
    each = len(marks) - 1
    low, high = scale(cells)
    levels = []
    for value in cells:
        share = (min(value, high) - low) / (high - low) if high > low else 0.0
        levels.append(0 if math.isnan(value) else 1 + round(share * (height * each - 1)))
    for line in reversed(range(height)):
        yield "".join(marks[max(0, min(each, level - line * each))] if level or line else "x" for level in levels)


def scale(cells: Sequence[float]) -> tuple[float, float]:
    """The values of the lowest and the highest mark; what is above has the highest, too."""
    finite = [value for value in cells if not math.isnan(value)]
    return (min(finite), max(finite[int(len(finite) * _STEEP) :])) if finite else (0.0, 0.0)
