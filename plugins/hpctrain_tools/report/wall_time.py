"""The wall time of a run by kind, since its first start and over all restarts. Times of files don't count: a copy has others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain_tools.report.curves import StartRows

STEPPING = ("forward", "backward", "communication", "optimizer", "other")
KINDS = ("stepping", "waiting for data", "evaluation", "saving", "start and end", "lost steps", "not running")


@dataclass(frozen=True)
class WallTime:
    """Seconds by kind, which add up to `seconds`, the time from the first start to the end or to now."""

    seconds: float
    of: Mapping[str, float]
    starts: int
    lost_steps: int

    def share(self, kind: str) -> float:
        """The part of the wall time that a kind has."""
        return self.of[kind] / self.seconds if self.seconds > 0 else 0.0


@dataclass
class Stretch:
    """A start until the next one. at: its time. until: the last sign of it. ends: the time of the next start, or of the end of all.
    lost: seconds of rows that were dropped."""

    at: float
    until: float
    ends: float
    rows: StartRows
    lost: float = 0.0

    @property
    def room(self) -> float:
        """The time until the last sign that is in no row."""
        return max(0.0, self.until - self.at - sum(self.rows.seconds.values()) - self.lost)

    @property
    def silence(self) -> float:
        """The time after the last sign."""
        return max(0.0, self.ends - self.until)


def account(stretches: Sequence[Stretch], lost_steps: int) -> WallTime | None:
    """The time by kind; None for a run whose starts are not known."""
    if not stretches:
        return None
    of = dict.fromkeys(KINDS, 0.0)
    for one in stretches:
        for kind, seconds in _of_stretch(one).items():
            of[kind] += seconds
    whole = sum(max(0.0, one.ends - one.at) for one in stretches)
    return WallTime(whole, of, len(stretches), lost_steps)


def _of_stretch(one: Stretch) -> dict[str, float]:
    """Time until the last sign of a start that is in no row, such as its last save, is start and end. After that sign, the job was
    not running."""
    found = {
        "stepping": sum(one.rows.seconds[part] for part in STEPPING),
        "waiting for data": one.rows.seconds["data"],
        "evaluation": one.rows.seconds["evaluation"],
        "saving": one.rows.seconds["checkpoint"],
        "lost steps": one.lost,
    }
    whole, in_rows = max(0.0, one.ends - one.at), sum(found.values())
    if in_rows > whole:  # clocks that differ, or sums that are estimates
        return {kind: seconds * whole / in_rows for kind, seconds in found.items()}
    until = min(max(one.until, one.at + in_rows), one.ends)
    return {**found, "start and end": until - one.at - in_rows, "not running": one.ends - until}
