"""The objects that `init` makes and `shutdown` ends: the process sets with their teams, the timeline, and the handles."""

from __future__ import annotations

import atexit
import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpctrain_horovod.engine import gloo_world, variables
from hpctrain_horovod.engine.errors import HorovodInternalError
from hpctrain_horovod.engine.negotiation import Agreed, Negotiation
from hpctrain_horovod.engine.request import JOIN, PROCESS_SET, Request
from hpctrain_horovod.engine.settings import EngineSettings
from hpctrain_horovod.engine.submission import Submission
from hpctrain_horovod.engine.timeline import Timeline
from hpctrain_horovod.engine.world import World

if TYPE_CHECKING:
    from hpctrain_horovod.engine.team import Team

_GRACE = 1.0  # seconds for operations in flight when this rank ends
_GRACE_AT_EXIT = 10.0
"""The same at the end of a script, whose handles nobody may have waited for: the other ranks submit these operations, too."""
_NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """A handle's operations. finish: makes the value of `synchronize` from their results."""

    team: Team
    submissions: tuple[Submission, ...]
    finish: Callable[[list[Any]], Any]


class Runtime:
    """An init of this process. Thread-safe."""

    def __init__(self, world: World, settings: EngineSettings) -> None:
        """Collective over the world."""
        self.world, self.settings = world, settings
        self.timeline = Timeline("MPI" if world.uses_mpi else "GLOO")
        self._teams: dict[int, Team] = {}
        self._sets: dict[int, list[int]] = {}
        self._next_set = itertools.count()
        self._handles: dict[int, Pending] = {}
        self._next_handle = itertools.count()
        self._lock = threading.Lock()
        self.register(list(range(world.size)))
        self.team(0).run_process_set = self._changed_set
        if settings.timeline is not None and world.rank == 0:
            self.timeline.start(settings.timeline, settings.mark_cycles)

    def register(self, ranks: Sequence[int]) -> int:
        """A new process set and its number. All ranks call this in the same order; only members make a team."""
        from hpctrain_horovod.engine.team import Team  # imports hpctrain.mpi, which sets RANK and its kin

        number = next(self._next_set)
        self._sets[number] = list(ranks)
        if self.world.rank in ranks:
            negotiation = Negotiation(self.world.links(ranks), self.settings.cache_capacity)
            store = self.world.store_of(f"process set {number}")
            self._teams[number] = Team(
                ranks,
                negotiation,
                lambda device: self.world.lane(ranks, device),
                store,
                self.settings,
                self.timeline,
                may_lose_ranks=not self.world.uses_mpi,
            )
        return number

    def sets(self) -> dict[int, list[int]]:
        """The ranks of each process set."""
        return dict(self._sets)

    def add_set(self, ranks: Sequence[int]) -> int:
        """Register a process set while operations run; all ranks of the world call this. Returns its number."""
        return int(self._together("add", ranks))

    def remove_set(self, number: int) -> None:
        """Remove a process set; all ranks of the world call this."""
        self._together(f"remove {number}", self._sets[number])

    def team(self, number: int) -> Team:
        """The team of a process set. Raises ValueError on ranks that are no members."""
        if number not in self._sets:
            raise ValueError(
                f"found process set {number}, expected one of {sorted(self._sets)}: add_process_set makes more"
            )
        if number not in self._teams:
            raise ValueError(
                f"found an operation of process set {number} on rank {self.world.rank}, expected one of its ranks "
                f"{self._sets[number]}"
            )
        return self._teams[number]

    def submit(
        self,
        team: Team,
        make: Callable[[int], Sequence[Submission]],
        finish: Callable[[list[Any]], Any] = lambda results: results[0],
        *,
        waits: bool = False,
    ) -> int:
        """Submit the operations that `make` returns for a number; returns the handle.

        The number is that of the set's operations so far, by which unnamed ones are matched. A refused one takes none.
        """
        with self._lock:
            submissions = tuple(make(team.submitted))
            team.submit(submissions, waits=waits)
            team.submitted += 1
            handle = next(self._next_handle)
            self._handles[handle] = Pending(team, submissions, finish)
        return handle

    def poll(self, handle: int) -> bool:
        """Whether an operation has finished. Raises ValueError for an unknown handle."""
        pending = self._handles.get(handle)
        if pending is None:
            raise ValueError(f"found handle {handle}, expected one of an operation that was not synchronized yet")
        return all(submission.is_over() for submission in pending.submissions)

    def synchronize(self, handle: int) -> Any:
        """Wait for an operation; its result, or None if it was synchronized before. Raises HorovodInternalError."""
        pending = self._handles.pop(handle, None)
        if pending is None:
            return None
        for submission in pending.submissions:
            pending.team.wait(submission)
        for submission in pending.submissions:
            if submission.error is not None:
                raise submission.error
        return pending.finish([submission.result for submission in pending.submissions])

    def join(self) -> int:
        """Contribute zeros until all ranks join; returns the last to do so.

        From then on all ranks number their operations alike again: those with more data have made more of them.
        """
        make = self.team(0), lambda number: [Submission(Request(JOIN), -1, value=number)]
        last, highest = self.synchronize(self.submit(*make, waits=True))
        with self._lock:
            self.team(0).submitted = highest + 1
        return int(last)

    def has_lost_ranks(self) -> bool:
        """Whether a rank has ended for good: MPI's ranks do not come back."""
        return self.world.uses_mpi and self.team(0).ended is not None

    def end(self, grace: float) -> None:
        """Fail what is still in flight after `grace` seconds, here and on the other ranks, and end the threads."""
        for team in self._teams.values():
            team.end(f"Horovod has been shut down: rank {self.world.rank} called shutdown() or has ended", grace)
        self.timeline.stop()
        self.world.close()

    def _together(self, name: str, ranks: Sequence[int]) -> Any:
        request = Request(PROCESS_SET, name=name, shape=tuple(ranks))
        handle = self.submit(self.team(0), lambda _: [Submission(request, -1)], waits=True)
        return self.synchronize(handle)

    def _changed_set(self, agreed: Agreed) -> int | None:
        """All ranks have asked for this change; runs on each of them."""
        word, _, number = agreed.request.name.partition(" ")
        if word == "add":
            return self.register(agreed.request.shape)
        team = self._teams.pop(int(number), None)
        del self._sets[int(number)]
        if team is not None:
            team.end(f"process set {number} was removed", _GRACE)
        return None


_runtime: Runtime | None = None
_last_rank: int | None = None


def start(comm: Any, dynamic: bool) -> None:
    """Initialize. Collective."""
    global _runtime, _last_rank
    settings = EngineSettings.from_environment()
    if dynamic:
        settings = replace(settings, dynamic_process_sets=True)
    if gloo_world.is_wanted():
        if comm is not None:
            raise ValueError("found comm= under horovodrun --gloo or --min-np, expected none: the ranks use no MPI")
        world: World = gloo_world.open_world()
    else:
        from hpctrain_horovod.engine.mpi_world import open_world  # starts MPI

        world = open_world(comm)
    variables.settle(world)
    _runtime = Runtime(world, settings)
    _last_rank = world.rank
    atexit.unregister(_stop_at_exit)
    atexit.register(_stop_at_exit)  # only now: before what the world has registered, the end of its store


def stop(grace: float = _GRACE) -> None:
    """End the runtime, if there is one."""
    global _runtime
    runtime, _runtime = _runtime, None
    if runtime is not None:
        runtime.end(grace)


def _stop_at_exit() -> None:
    failed = hasattr(sys, "last_value")  # Python has printed a traceback: the others need not wait for this rank
    stop(_GRACE if failed else _GRACE_AT_EXIT)


def last_rank() -> int | None:
    """This process's rank since the newest `start`, also after `stop`; None before the first."""
    return _last_rank


def is_running() -> bool:
    """Whether `start` was called, and `stop` was not called since."""
    return _runtime is not None


def known() -> Runtime:
    """The runtime. Raises ValueError before init."""
    if _runtime is None:
        raise ValueError(_NOT_INITIALIZED)
    return _runtime


def working() -> Runtime:
    """The runtime, for an operation. Raises HorovodInternalError before init."""
    if _runtime is None:
        raise HorovodInternalError(_NOT_INITIALIZED)
    return _runtime
