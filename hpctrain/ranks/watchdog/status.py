"""The status of a rank at a moment, as the others are told; those of all ranks in sentences: who is missing, who waits where."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from hpctrain.base.errors import name_ranks
from hpctrain.contracts.identity import Identity
from hpctrain.ranks.watchdog.position import COMPILING, FIRST, LOADER, UNLIMITED, Position, is_unlimited
from hpctrain.ranks.watchdog.stacks import UNNAMED, Spot, frame_of, loading_line, spot_of, unfinished, worker_lines

_LOADING = ("data", FIRST, "evaluation")  # phases that wait for samples


class Beat(NamedTuple):
    """A heartbeat. step: the last completed one. idle: seconds without a move, which make each heartbeat another one."""

    phase: str
    step: int
    idle: float

    def is_overdue(self, limit: float) -> bool:
        """Whether it has been in its phase for longer than phases may take."""
        return self.idle > limit and not is_unlimited(self.phase)

    @property
    def where(self) -> str:
        """Step and phase in words."""
        return self.phase if self.phase in UNLIMITED else f"step {self.step + 1}, {self.phase}"


class RankStatus(NamedTuple):
    """A rank's position. line: file, line and source. waits_for: the operation with other ranks in which it waits, or None.
    loading: clauses with the lines at which samples are loaded, if training waits for them.
    """

    rank: int
    node: str
    beat: Beat
    line: str
    waits_for: str | None
    loading: list[str]

    @classmethod
    def from_json(cls, text: bytes) -> RankStatus:
        """The status in the store, as json.dumps has written it."""
        rank, node, beat, *more = json.loads(text)
        return cls(rank, node, Beat(*beat), *more)


def beat_of(position: Position) -> Beat:
    """This rank's heartbeat."""
    return Beat(position.phase, position.step, position.idle)


def status_of(identity: Identity, position: Position) -> RankStatus:
    """This rank's status."""
    failure = position.failure
    spot = spot_of(frame_of(position.thread)) if failure is None else Spot(failure, "an operation that has failed")
    waits_for = spot.communication
    if waits_for is not None:  # the oldest operation over MPI that has not finished says more than the stack
        engine: Any = sys.modules.get("hpctrain.mpi.process_group.engine")
        recorded = unfinished() if waits_for == UNNAMED else []
        waits_for = next(iter([*(engine.in_flight() if engine else ()), *recorded]), waits_for)
    loading = _loading() if position.phase.removesuffix(COMPILING) in _LOADING else []
    return RankStatus(identity.rank, identity.node, beat_of(position), spot.line, waits_for, loading)


def _loading() -> list[str]:
    """The lines at which processes load samples, and at which this process's thread does."""
    threads = [line for one in threading.enumerate() if one.name == LOADER and (line := loading_line(one.ident))]
    lines = {"a process that loads samples": worker_lines(), "the thread that loads samples": threads}
    return [f"{who} is at {line}" for who, of_kind in lines.items() for line in of_kind]


class Silent(NamedTuple):
    """A rank that sends no heartbeats. seconds: since the last one. last: None if there never was one."""

    rank: int
    node: str
    seconds: float
    last: Beat | None


def sentences(statuses: Sequence[RankStatus], silent: Sequence[Silent], limit: float) -> list[str]:
    """The diagnosis, a line each. limit: seconds that a phase may take."""
    lines = [f"{'missing' if rank.seconds > limit else 'no answer in time'}: {_silent(rank)}" for rank in silent]
    absent = [one for one in statuses if one.waits_for is None]
    kinds = {
        "missing": [one for one in absent if one.beat.idle >= limit / 2],
        "at work": [one for one in absent if one.beat.idle < limit / 2],
        "waiting": [one for one in statuses if one.waits_for is not None],
    }
    return lines + [f"{kind}: {told}" for kind, of_kind in kinds.items() for told in _grouped(of_kind)]


def _silent(rank: Silent) -> str:
    where = f"last seen in {rank.last.where}" if rank.last is not None else "never seen"
    return (
        f"rank {rank.rank} on {rank.node} has sent no heartbeat for {rank.seconds:.0f} s: stopped, killed, or its node is out of "
        f"reach ({where})"
    )


def _grouped(statuses: Sequence[RankStatus]) -> list[str]:
    """Ranks that do the same are told together, the fewest first."""
    groups: dict[tuple[object, ...], list[RankStatus]] = {}
    for one in statuses:
        groups.setdefault((one.beat.where, one.line, one.waits_for), []).append(one)
    return [_told(group) for group in sorted(groups.values(), key=lambda group: (len(group), group[0].rank))]


def _told(group: Sequence[RankStatus]) -> str:
    one = group[0]
    nodes = list(dict.fromkeys(member.node for member in group))
    shown = ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more nodes" if len(nodes) > 3 else "")
    verb = "is" if len(group) == 1 else "are"
    waits = f"; waits for {one.waits_for}" if one.waits_for else ""
    loading = f"; {' and '.join(one.loading[:3])}" if one.loading else ""
    idle = max(member.beat.idle for member in group)
    since = f" for {idle:.0f} s" if idle else ""
    who = f"{name_ranks([member.rank for member in group])} on {shown}"
    return f"{who} {verb} in {one.beat.where}{since}, at {one.line}{waits}{loading}"
