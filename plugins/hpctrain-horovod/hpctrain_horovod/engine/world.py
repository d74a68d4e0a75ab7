"""The processes of the job: who they are, and how they reach each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch.distributed.distributed_c10d import Store

from hpctrain_horovod.engine.lane import Lane
from hpctrain_horovod.engine.links import Links


class World(Protocol):
    """The world that `init` finds. Methods with ranks are collective over them; ranks are numbers in this world."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool
    comm: Any
    """An mpi4py communicator of all ranks; None without MPI."""
    uses_mpi: bool

    def close(self) -> None:
        """Called by `shutdown`, when no operation runs any more."""

    def has_updates(self) -> bool:
        """Whether other processes wait to take part, or some of these are to leave."""

    def has_synchronized(self) -> None:
        """Called when this process has the training state of rank 0: others may take it over from now on."""

    def ranks_of(self, comm: Any) -> list[int]:
        """The ranks of an mpi4py communicator. Raises ValueError if some are outside."""

    def comm_of(self, ranks: Sequence[int]) -> Any:
        """An mpi4py communicator of these ranks; None without MPI."""

    def store_of(self, name: str) -> Store:
        """Keys of their own, for `name` since the last init."""

    def links(self, ranks: Sequence[int]) -> Links:
        """The messages between these ranks since the last init."""

    def lane(self, ranks: Sequence[int], device: str) -> Lane:
        """The data path between these ranks for a kind of device."""
