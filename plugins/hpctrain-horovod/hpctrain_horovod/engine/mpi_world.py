"""The processes of the job, started by mpiexec or srun: who they are, and how they reach each other.

Importing this module starts MPI; `init` does so.
"""

from __future__ import annotations

import math
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from hpctrain.mpi import MPI, Patience, Settings, create_group, wait_until, world
from hpctrain_horovod.engine.lane import Lane, accelerator_group
from hpctrain_horovod.engine.links import Links

_TIMEOUT = timedelta(minutes=30)
"""The limit for the data of an operation that all ranks have agreed to run."""


class MPILinks:
    """Messages of one tag over an MPI communicator."""

    def __init__(self, comm: MPI.Comm, tag: int) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._comm, self._tag = comm, tag
        self._sent: defaultdict[int, deque[tuple[MPI.Request, bytes]]] = defaultdict(deque)
        self._status = MPI.Status()

    def send(self, rank: int, message: bytes) -> None:
        self._has_left(rank)
        self._sent[rank].append((self._comm.Isend([message, MPI.BYTE], rank, self._tag), message))

    def flush(self, rank: int) -> None:
        deadline = time.perf_counter() + _TIMEOUT.total_seconds()
        wait_until(lambda: self._has_left(rank), deadline, Patience.LONG, notice_after=math.inf, notice=lambda: None)

    def _has_left(self, rank: int) -> bool:
        sent = self._sent[rank]
        while sent and sent[0][0].Test():
            sent.popleft()
        return not sent

    def receive(self) -> tuple[int, bytes] | None:
        arrived = self._comm.Improbe(MPI.ANY_SOURCE, self._tag, self._status)
        if arrived is None:
            return None
        content = bytearray(self._status.Get_count(MPI.BYTE))
        arrived.Recv([content, MPI.BYTE])
        return self._status.Get_source(), bytes(content)


_opened: dict[tuple[int, ...], MPIWorld] = {}


class MPIWorld:
    """The ranks of an MPI communicator. Their links and groups over MPI outlive a shutdown, for the next init."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """ranks: those of MPI's world, this one among them. Collective over all processes of MPI's world."""
        store, _, _ = next(rendezvous("mpi://", timeout=_TIMEOUT))
        self._store = PrefixStore(f"horovod/{'-'.join(map(str, ranks))}", store)
        self._ranks = list(ranks)
        self._comms: dict[tuple[int, ...], MPI.Comm] = {}
        self._made_links: dict[tuple[int, ...], int] = {}
        self._lanes: dict[tuple[tuple[int, ...], str], Lane] = {}
        self.comm = comm = self.comm_of(range(len(ranks)))
        self.rank, self.size = comm.rank, comm.size
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = node.rank, node.size
        cross = comm.Split(node.rank)
        self.cross_rank, self.cross_size = cross.rank, cross.size
        sizes = np.empty(comm.size, dtype=np.int64)
        comm.Allgather(np.array([node.size], dtype=np.int64), sizes)
        self.homogeneous = len(set(sizes.tolist())) == 1
        node.Free()
        cross.Free()
        self.generation = 0
        self.uses_mpi = True

    def close(self) -> None:
        """Keep everything over MPI for the next init; an accelerator's groups have threads, which must not see Python end."""
        for key in [key for key in self._lanes if key[1] != "cpu"]:
            self._lanes.pop(key).close()

    def has_updates(self) -> bool:
        """MPI's processes stay the same."""
        return False

    def has_synchronized(self) -> None:
        """Nobody comes who could take the state over."""

    def ranks_of(self, comm: MPI.Comm) -> list[int]:
        """The ranks of an mpi4py communicator in this world. Raises ValueError if some are outside."""
        ranks = MPI.Group.Translate_ranks(comm.group, list(range(comm.size)), world().group)
        return sorted(self._ranks.index(rank) for rank in ranks)

    def store_of(self, name: str) -> Store:
        """Keys of their own, for `name` since the last init."""
        return PrefixStore(f"{self.generation}/{name}", self._store)

    def comm_of(self, ranks: Sequence[int]) -> MPI.Comm:
        """The communicator of these ranks, made on the first call. Collective over them."""
        key = tuple(ranks)
        if key not in self._comms:
            tag = zlib.crc32(repr(("horovod", self._ranks, key)).encode()) % 2**15
            members = world().group.Incl([self._ranks[rank] for rank in ranks])
            self._comms[key] = world().Create_group(members, tag)
        return self._comms[key]

    def links(self, ranks: Sequence[int]) -> Links:
        """The messages between these ranks since the last init: older ones are never received. Collective over the ranks."""
        made = self._made_links[tuple(ranks)] = self._made_links.get(tuple(ranks), 0) + 1
        # under the tags before, messages of an earlier set of these ranks may still lie there
        return MPILinks(self.comm_of(ranks), made % 2**15)

    def lane(self, ranks: Sequence[int], device: str) -> Lane:
        """The data path between these ranks for a kind of device. Collective over them, on the first call."""
        key = tuple(ranks), device
        if key not in self._lanes:
            self._lanes[key] = self._new_lane(ranks, device)
        return self._lanes[key]

    def _new_lane(self, ranks: Sequence[int], device: str) -> Lane:
        name = f"{device} {'-'.join(map(str, ranks))}"
        store = self.store_of(name)
        place = list(ranks).index(self.rank)
        options = SimpleNamespace(
            global_ranks_in_group=[self._ranks[rank] for rank in ranks], group_size=len(ranks), group_rank=place,
            group_id=f"horovod {name}", store=store, timeout=_TIMEOUT,
        )  # fmt: skip
        of_cpu = device == "cpu"
        group = create_group(options, Settings()) if of_cpu else accelerator_group(torch.device(device), options)
        return Lane(group, place, len(ranks), averages=True)


def open_world(comm: Any = None) -> MPIWorld:
    """The world of `comm`: None for all ranks, ranks of MPI's world, or an mpi4py communicator. Collective.

    Raises ValueError if `comm` lacks this rank.
    """
    everyone = world()
    if comm is None:
        ranks = tuple(range(everyone.size))
    elif isinstance(comm, MPI.Comm):
        ranks = tuple(MPI.Group.Translate_ranks(comm.group, list(range(comm.size)), everyone.group))
    else:
        ranks = tuple(sorted(int(rank) for rank in comm)) or tuple(range(everyone.size))
    if everyone.rank not in ranks:
        raise ValueError(f"found comm={list(ranks)} on rank {everyone.rank}, expected ranks with this one among them")
    if ranks not in _opened:
        _opened[ranks] = MPIWorld(ranks)
    opened = _opened[ranks]
    opened.generation += 1
    return opened
