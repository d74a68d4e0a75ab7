"""Goodput: the share of the wall time since a run's first start that went into steps that count.

A step that a resume or a rollback drops, and trains again, does not count; nor do starts, evaluations, saves, waiting for data, and
the time in which the job was not running. (Google's ML Productivity Goodput, 2024, defines the term so.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from hpctrain.base.safe_files import STARTS, reading

# the parts of a step's time that train
_STEPPING = ("forward", "backward", "communication", "optimizer", "other")
_LONGEST_LINE = 2**20


class Goodput:
    """Adds up the rows that count."""

    def __init__(self, first_start: float) -> None:
        """first_start: seconds since 1970."""
        self._first_start, self._seconds = first_start, 0.0
        self.lost_steps, self.lost_seconds = 0, 0.0
        """Steps whose rows were dropped, and all their time."""

    def see(self, row: Mapping[str, Any]) -> None:
        """A row that counts."""
        self._seconds += sum(seconds_of(row, _STEPPING))

    def lose(self, row: Mapping[str, Any]) -> None:
        """A row that is dropped."""
        found = seconds_of(row)
        self.lost_steps, self.lost_seconds = self.lost_steps + bool(found), self.lost_seconds + sum(found)

    def share(self, now: float) -> float | None:
        """The goodput at a time, in seconds since 1970; None if the clock has been set back."""
        return self._seconds / (now - self._first_start) if now > self._first_start else None


def seconds_of(row: Mapping[str, Any], parts: tuple[str, ...] | None = None) -> list[float]:
    """The seconds of these parts, or of all, in a row; the row may be another program's."""
    found = row.get("seconds")
    if not isinstance(found, Mapping):
        return []
    return [
        float(one) for name, one in found.items() if isinstance(one, (int, float)) and (parts is None or name in parts)
    ]


def first_start(output_dir: Path, now: float) -> float:
    """The time of the run's first start, in seconds since 1970; `now` if it is not known."""
    with (
        suppress(OSError, ValueError, TypeError),
        reading(output_dir / STARTS) as fd,
        open(fd, "rb", closefd=False) as file,
    ):
        found = json.loads(file.readline(_LONGEST_LINE))["time"]
        return datetime.fromisoformat(found).timestamp()
    return now
