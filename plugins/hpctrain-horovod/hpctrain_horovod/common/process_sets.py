"""Sets of ranks that communicate among themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpctrain_horovod.engine import runtime


class ProcessSet:
    """Some of the ranks. Usable once it was passed to `init` or `add_process_set`, by all ranks."""

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Any) -> None:
        """ranks_or_comm: global ranks, or an mpi4py communicator of them."""
        if isinstance(ranks_or_comm, Sequence) or not hasattr(ranks_or_comm, "Get_group"):
            self.ranks = sorted({int(rank) for rank in ranks_or_comm})
        else:
            self.mpi_comm = ranks_or_comm

    def size(self) -> int | None:
        """The number of ranks in the set; None before it is registered."""
        return len(self.ranks) if self._is_registered() and self.ranks is not None else None

    def rank(self) -> int | None:
        """This process's rank in the set; None before it is registered. Raises ValueError outside of the set."""
        if not self._is_registered() or self.ranks is None:
            return None
        mine = runtime.known().world.rank
        if mine not in self.ranks:
            raise ValueError(
                f"found rank {mine}, expected one of process set {self.process_set_id}'s ranks {self.ranks}"
            )
        return self.ranks.index(mine)

    def included(self) -> bool:
        """Whether this process is one of the ranks."""
        return runtime.known().world.rank in (self.ranks or ())

    def _is_registered(self) -> bool:
        runtime.known()
        return self.process_set_id is not None

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__


global_process_set = ProcessSet([])
"""All ranks; process set 0."""

_added: dict[int, list[ProcessSet]] = {}
"""Process sets by number; a script may have several objects of a set."""


def initialize(process_sets: Sequence[ProcessSet | Sequence[int]]) -> list[list[int]]:
    """Number the sets that `init` was given, in their order, and the one of all ranks. Returns the ranks of those that come again.

    Raises ValueError for ranks that do not exist.
    """
    active = runtime.known()
    global_process_set.process_set_id = 0
    global_process_set.ranks = list(range(active.world.size))
    global_process_set.mpi_comm = active.world.comm
    _added.clear()
    twice = []
    for one in map(_as_set, process_sets):
        ranks = _existing(one)
        if ranks in active.sets().values():
            twice.append(ranks)
        else:
            _note(one, ranks, active.register(ranks))
    return twice


def look_up(process_sets: Sequence[ProcessSet | Sequence[int]]) -> None:
    """Give the sets the numbers under which `init` has registered their ranks before. Raises ValueError for others."""
    numbers = {tuple(ranks): number for number, ranks in runtime.known().sets().items()}
    for one in map(_as_set, process_sets):
        ranks = _existing(one)
        if tuple(ranks) not in numbers:
            raise ValueError(
                f"found a process set of the ranks {ranks} in a second hvd.init, which registers none; pass it to the first, or to "
                "hvd.add_process_set"
            )
        _note(one, ranks, numbers[tuple(ranks)])


def forget() -> None:
    """Forget all sets: after a shutdown none is registered."""
    for one in (global_process_set, *(one for ones in _added.values() for one in ones)):
        one.process_set_id = None
    _added.clear()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set while the job runs. All ranks call this, with the same ranks in the same order of calls.

    Raises ValueError if the set exists, has ranks that do not, or init was not told of dynamic sets; HorovodInternalError if the
    ranks ask for different ones.
    """
    active = runtime.known()
    _need_dynamic()
    one = _as_set(process_set)
    ranks = _checked(one)
    _note(one, ranks, active.add_set(ranks))
    return one


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set; all ranks call this. False if it was not registered, or is the one of all ranks."""
    active = runtime.known()
    _need_dynamic()
    number = process_set.process_set_id
    if not number or number not in _added:
        return False
    active.remove_set(number)
    for one in _added.pop(number):
        one.process_set_id = None
    return True


def _need_dynamic() -> None:
    if not runtime.known().settings.dynamic_process_sets:
        raise ValueError(
            'process sets can change only after hvd.init(process_sets="dynamic"), or with HOROVOD_DYNAMIC_PROCESS_SETS=1'
        )


def _as_set(given: ProcessSet | Sequence[int]) -> ProcessSet:
    return given if isinstance(given, ProcessSet) else ProcessSet(given)


def _existing(one: ProcessSet) -> list[int]:
    """The set's ranks. Raises ValueError if there are no such ranks."""
    active = runtime.known()
    ranks = active.world.ranks_of(one.mpi_comm) if one.ranks is None else one.ranks
    size = active.world.size
    if not ranks or ranks[0] < 0 or ranks[-1] >= size:
        raise ValueError(f"found a process set of the ranks {ranks}, expected some of 0 to {size - 1}")
    return ranks


def _checked(one: ProcessSet) -> list[int]:
    """The ranks of a set to register. Raises ValueError."""
    ranks = _existing(one)
    if one.process_set_id is not None or ranks in runtime.known().sets().values():
        raise ValueError(f"found a second process set of the ranks {ranks}, expected one that is not registered yet")
    return ranks


def _note(one: ProcessSet, ranks: list[int], number: int) -> None:
    one.ranks, one.process_set_id = list(ranks), number
    active = runtime.known()
    if active.world.rank in ranks:
        one.mpi_comm = active.world.comm_of(ranks)
    _added.setdefault(number, []).append(one)
