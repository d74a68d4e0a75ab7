"""The facts about a run that its report is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any, Literal

from hpctrain_tools.report.curves import Rows
from hpctrain_tools.report.plan_file import JobPlan
from hpctrain_tools.report.wall_time import WallTime
from hpctrain_tools.runs import Failure, JobSeen, LogLine, StartsSeen

How = Literal["done", "running", "stopped", "cancelled", "failed", "killed", "pending", "unknown"]


@dataclass(frozen=True)
class Ending:
    """How a run stands. why: the error of a failed one, or the words of the others; "" if there are none."""

    how: How
    why: str = ""
    failure: Failure | None = None


@dataclass(frozen=True)
class Layout:
    """The places of the ranks. axes: sizes, outermost first. hosts: of each rank; "" if that is not known."""

    axes: Mapping[str, int]
    hosts: tuple[str, ...]

    def place(self, rank: int) -> dict[str, int]:
        """A rank's place on each axis."""
        found, left = {}, rank
        for axis, size in reversed(list(self.axes.items())):
            left, found[axis] = divmod(left, size)
        return dict(reversed(found.items()))

    @property
    def data_ranks(self) -> int:
        """Ranks of the axes that see different samples."""
        return prod(size for axis, size in self.axes.items() if axis.startswith("dp")) or 1

    @property
    def per_host(self) -> int:
        """Ranks of a host."""
        return max(1, len(self.hosts) // max(1, len(set(self.hosts))))


@dataclass(frozen=True)
class Event:
    """Something that happened in a run. time: in seconds since 1970."""

    time: float
    kind: str
    text: str


@dataclass(frozen=True)
class Facts:
    """A run as its files have it."""

    directory: Path
    job: JobSeen
    tables: Mapping[str, Any]
    ending: Ending
    starts: StartsSeen
    rows: Rows
    wall: WallTime | None
    layout: Layout | None
    described: Mapping[str, str]
    """Lines of the newest start in rank 0's log, such as "mesh"."""
    checkpoints: list[tuple[int, float]]
    log: list[LogLine]
    last_lines: list[str]
    events: list[Event]
    scheduler: tuple[str, str] | None
    """The scheduler and the id of the newest submission."""
    offset: timedelta
    """The difference of the job's clock from UTC."""
    plan: JobPlan | None = None
    """The plan that the run is to be compared with."""

    @property
    def name(self) -> str:
        """The name of the job, or its directory's."""
        return self.job.name or self.directory.name or str(self.directory)

    @property
    def device_bytes(self) -> float | None:
        """The memory of an accelerator."""
        return self.starts.starts[-1].device_bytes if self.starts.starts else None

    def key(self, *names: str) -> Any:
        """A key of the job, None if it has none: the file may have anything in its place."""
        found: Any = self.tables
        for name in names:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    def count(self, *names: str) -> int | None:
        """A key of the job that is a number of things."""
        found = self.key(*names)
        return found if type(found) is int and 0 <= found < 2**40 else None

    def steady_share(self, part: str) -> float:
        """The share of a part of the steps' time, without saves and evaluations."""
        whole = sum(seconds for name, seconds in self.rows.steady.items() if name not in ("evaluation", "checkpoint"))
        return self.rows.steady.get(part, 0.0) / whole if whole > 0 else 0.0

    @property
    def step_seconds(self) -> float | None:
        """The mean time of a step without saves and evaluations."""
        whole = sum(seconds for name, seconds in self.rows.steady.items() if name not in ("evaluation", "checkpoint"))
        return whole / self.rows.steady_steps if self.rows.steady_steps else None


def flat(tables: object, longest: int, prefix: str = "", depth: int = 0) -> list[tuple[str, str]]:
    """The keys of nested tables, joined by dots, with their values as texts of at most so many letters."""
    if isinstance(tables, Mapping) and depth < 8:
        return [
            pair
            for key, value in tables.items()
            for pair in flat(value, longest, f"{prefix}.{key}".strip("."), depth + 1)
        ]
    return [(prefix, str(tables)[:longest])]
