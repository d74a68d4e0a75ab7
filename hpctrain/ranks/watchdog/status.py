"""The status of a rank at a moment, as the others are told."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

from hpctrain.contracts.identity import Identity
from hpctrain.ranks.watchdog.position import COMPILING, FIRST, LOADER, UNLIMITED, Position, is_unlimited
from hpctrain.ranks.watchdog.recorder import unfinished
from hpctrain.ranks.watchdog.stacks import UNNAMED, Spot, frame_of, loading_line, spot_of, worker_line
from hpctrain.ranks.watchdog.workers import worker_stacks

_LOADING = ("data", FIRST, "evaluation")
"""Phases that wait for samples."""
_PROCESS, _THREAD = "a process that loads samples", "the thread that loads samples"


@dataclass(frozen=True)
class Beat:
    """A heartbeat. step: the last completed one. idle: seconds without a move. number: makes each heartbeat another one."""

    phase: str
    step: int
    idle: float
    number: int = 0

    def as_json(self) -> str:
        """The JSON text for the store."""
        return json.dumps([self.phase, self.step, round(self.idle, 3), self.number])

    @classmethod
    def from_json(cls, text: bytes) -> Beat:
        """Raises ValueError for anything else."""
        phase, step, idle, number = json.loads(text)
        return cls(str(phase), int(step), float(idle), int(number))

    def is_overdue(self, limit: float) -> bool:
        """Whether it has been in its phase for longer than phases may take."""
        return self.idle > limit and not is_unlimited(self.phase)

    @property
    def where(self) -> str:
        """Step and phase in words."""
        return self.phase if self.phase in UNLIMITED else f"step {self.step + 1}, {self.phase}"


@dataclass(frozen=True)
class RankStatus:
    """A rank's position, and what it waits for. line: file, line and source. pending: operations over MPI that have not finished.
    workers: clauses with the lines at which samples are loaded, if training waits for them. ran: `Position.blocks`.
    """

    rank: int
    node: str
    phase: str
    step: int
    idle: float
    line: str
    communication: str | None
    pending: list[str]
    workers: list[str]
    ran: list[str]

    @property
    def beat(self) -> Beat:
        """The rank's position."""
        return Beat(self.phase, self.step, self.idle)

    @property
    def waits_for(self) -> str | None:
        """The oldest operation over MPI that has not finished, else the one that the stack shows."""
        return self.pending[0] if self.communication and self.pending else self.communication

    def as_json(self) -> str:
        """The JSON text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankStatus:
        """Raises ValueError or TypeError for anything else."""
        return cls(**json.loads(text))


def beat_of(position: Position, number: int) -> Beat:
    """This rank's heartbeat."""
    return Beat(position.phase, position.step, position.idle, number)


def status_of(identity: Identity, position: Position) -> RankStatus:
    """This rank's status."""
    failure = position.failure
    spot = spot_of(frame_of(position.thread)) if failure is None else Spot(failure, "an operation that has failed")
    communication = spot.communication
    if communication == UNNAMED:
        communication = next(iter(unfinished()), UNNAMED)
    workers = _loading() if position.phase.removesuffix(COMPILING) in _LOADING else []
    return RankStatus(
        identity.rank, identity.node, position.phase, position.step, position.idle, spot.line, communication,
        _pending(), workers, position.blocks(),
    )  # fmt: skip


def _loading() -> list[str]:
    """The lines at which processes load samples, and at which this process's thread does."""
    processes = dict.fromkeys(filter(None, map(worker_line, worker_stacks().values())))
    threads = [line for one in threading.enumerate() if one.name == LOADER and (line := loading_line(one.ident))]
    return [f"{what} is at {line}" for what, lines in ((_PROCESS, processes), (_THREAD, threads)) for line in lines]


def _pending() -> list[str]:
    mpi: ModuleType | Any = sys.modules.get("hpctrain.mpi.process_group.engine")
    return [] if mpi is None else list(mpi.in_flight())
