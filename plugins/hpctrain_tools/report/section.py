"""A section of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Section:
    """A part of a report. rows: a table, whose first column names the others. plots: names of what plots.py draws."""

    title: str
    lines: Sequence[str] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    plots: Sequence[str] = ()
    log: Sequence[str] = field(default=())

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.lines or self.rows or self.plots or self.log)
