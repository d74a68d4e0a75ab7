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
    threads = [
        line for thread in threading.enumerate() if thread.name == LOADER and (line := loading_line(thread.ident))
    ]
    lines = {"a process that loads samples": worker_lines(), "the thread that loads samples": threads}
    return [f"{who} is at {line}" for who, of_kind in lines.items() for line in of_kind]


class Silent(NamedTuple):
    """A rank that sends no heartbeats. seconds: since the last one. where: a clause about what that one told."""

    rank: int
    node: str
    seconds: float
    where: str


def sentences(statuses: Sequence[RankStatus], silent: Sequence[Silent], limit: float) -> list[str]:
    """The diagnosis, a line each. limit: seconds that a phase may take."""
    lines = [
        f"{'missing' if lost.seconds > limit else 'no answer in time'}: rank {lost.rank} on {lost.node} has sent no heartbeat for "
        f"{lost.seconds:.0f} s: stopped, killed, or its node is out of reach ({lost.where})"
        for lost in silent
    ]
    absent = [status for status in statuses if status.waits_for is None]
    kinds = {
        "missing": [status for status in absent if status.beat.idle >= limit / 2],  # others of the same hang came later
        "at work": [status for status in absent if status.beat.idle < limit / 2],
        "waiting": [status for status in statuses if status.waits_for is not None],
    }
    return lines + [f"{kind}: {clause}" for kind, of_kind in kinds.items() for clause in _grouped(of_kind)]


def _grouped(statuses: Sequence[RankStatus]) -> list[str]:
    """Ranks that do the same are told together, the fewest first."""
    groups: dict[tuple[object, ...], list[RankStatus]] = {}
    for status in statuses:
        groups.setdefault((status.beat.where, status.line, status.waits_for), []).append(status)
    return [_clause(group) for group in sorted(groups.values(), key=lambda group: (len(group), group[0].rank))]


def _clause(group: Sequence[RankStatus]) -> str:
    status = group[0]
    nodes = list(dict.fromkeys(member.node for member in group))
    shown = ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more nodes" if len(nodes) > 3 else "")
    verb = "is" if len(group) == 1 else "are"
    waits = f"; waits for {status.waits_for}" if status.waits_for else ""
    loading = f"; {' and '.join(status.loading[:3])}" if status.loading else ""
    idle = max(member.beat.idle for member in group)
    since = f" for {idle:.0f} s" if idle else ""
    who = f"{name_ranks([member.rank for member in group])} on {shown}"
    return f"{who} {verb} in {status.beat.where}{since}, at {status.line}{waits}{loading}"
