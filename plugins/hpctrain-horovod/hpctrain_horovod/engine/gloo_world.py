"""The processes of a job that `hpctrain horovodrun --gloo` or `--min-np` started: they meet in its store and use no MPI.

Such a job can lose processes and get others, so each `init` asks the starter anew for this process's rank.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from hpctrain.base.store.client import GuardedStore, open_store
from hpctrain.base.store.gloo import create_group as create_gloo_group
from hpctrain.base.store.network import bind_communication
from hpctrain_horovod.engine.errors import HorovodInternalError
from hpctrain_horovod.engine.lane import GlooLane, Lane, accelerator_group
from hpctrain_horovod.engine.links import Links
from hpctrain_horovod.engine.socket_links import SocketLinks
from hpctrain_horovod.engine.variables import WORKER

STARTER = "HPCTRAIN_HOROVOD_STARTER"
"""The file with the address and the secret of the starter's store."""
_TIMEOUT = timedelta(minutes=30)
_CONNECT = 60.0  # seconds to reach the starter
_ASK_AGAIN = timedelta(hours=1)
_LONGER = 60.0
"""Seconds in which the starter ends the workers that do not come, and tells the others' new ranks."""
_FIRST_TIME = 1e6
"""Seconds that a new worker waits: the others take it in at a commit, and the starter ends it otherwise."""

_store: GuardedStore | None = None
_inits = 0


def is_wanted() -> bool:
    """Whether this process was started without MPI."""
    return STARTER in os.environ


def starter_store() -> GuardedStore:
    """The store of the starter. Raises OSError if it cannot be reached."""
    global _store
    if _store is None:
        where = json.loads(Path(os.environ[STARTER]).read_text())
        secret = bytes.fromhex(where["secret"])
        addresses = [(host, port) for host, port in where["addresses"]]
        _store = open_store(addresses, lambda _: secret, _CONNECT, _TIMEOUT)
        bind_communication(_store.local_host)
        threading.Thread(target=_leave_with_starter, args=(_store,), name="starter", daemon=True).start()
    return _store


def open_world() -> GlooWorld:
    """Ask for a rank, and wait until the starter has enough processes.

    Raises HorovodInternalError if that takes longer than HOROVOD_ELASTIC_TIMEOUT (600 seconds).
    """
    global _inits
    store, worker = starter_store(), os.environ[WORKER]
    _inits += 1
    seconds = float(os.environ.get("HOROVOD_ELASTIC_TIMEOUT") or 600) + _LONGER if _inits > 1 else _FIRST_TIME
    store.set(f"asks/{worker}", str(_inits))
    key = f"rank/{worker}/{_inits}"
    try:
        store.wait([key], timedelta(seconds=seconds))
    except dist.DistStoreError:
        raise HorovodInternalError(
            f"worker {worker} got no rank within {seconds:g} s: the job has fewer processes than --min-np, or some of them do "
            "not come back to hvd.init"
        ) from None
    place = json.loads(store.get(key))
    if "leave" in place:
        raise SystemExit(0)  # this worker's slot is gone; the others go on without it
    return GlooWorld(store, place)


class GlooWorld:
    """The ranks of one init."""

    uses_mpi = False

    def __init__(self, store: GuardedStore, place: dict[str, Any]) -> None:
        """place: this process's ranks and sizes, and the number of this set of processes, from the starter."""
        self.rank, self.size = place["rank"], place["size"]
        self.local_rank, self.local_size = place["local_rank"], place["local_size"]
        self.cross_rank, self.cross_size = place["cross_rank"], place["cross_size"]
        self.homogeneous = place["homogeneous"]
        self.comm = None
        self.generation = place["generation"]
        self._guarded, self._store = store, PrefixStore(f"generation/{self.generation}", store)
        self._links: list[SocketLinks] = []
        self._made: dict[tuple[int, ...], int] = {}
        self._lanes: list[Lane] = []

    def close(self) -> None:
        for one in self._links:
            one.close()
        for lane in self._lanes:
            lane.close()

    def has_updates(self) -> bool:
        return self._guarded.check([f"update/{self.generation}"])

    def has_synchronized(self) -> None:
        self._guarded.set(f"holds/{os.environ[WORKER]}", "")

    def ranks_of(self, comm: Any) -> list[int]:
        raise ValueError("found a process set of an MPI communicator, expected ranks: this job uses no MPI")

    def comm_of(self, ranks: Sequence[int]) -> None:
        return None

    def store_of(self, name: str) -> Store:
        return PrefixStore(name, self._store)

    def links(self, ranks: Sequence[int]) -> Links:
        made = self._made[tuple(ranks)] = self._made.get(tuple(ranks), 0) + 1
        store = self.store_of(f"links {made} {list(ranks)}")
        place = list(ranks).index(self.rank)
        links = SocketLinks(store, self._guarded.secret, self._guarded.local_host, place, len(ranks))
        self._links.append(links)
        return links

    def lane(self, ranks: Sequence[int], device: str) -> Lane:
        name = f"lane {device} {list(ranks)}"
        store, place = self.store_of(name), list(ranks).index(self.rank)
        options = SimpleNamespace(
            store=store, group_rank=place, group_size=len(ranks), global_ranks_in_group=list(ranks),
            timeout=timedelta(seconds=_CONNECT),
            group_id=f"horovod {self.generation} {name}",
        )  # fmt: skip
        if device != "cpu":
            options.timeout = _TIMEOUT
            group = accelerator_group(torch.device(device), options)
            self._lanes.append(Lane(group, place, len(ranks), averages=True))
            return self._lanes[-1]
        made: Any = create_gloo_group(options)  # torch's types make it no ProcessGroup, which it is
        made.set_timeout(_TIMEOUT)
        self._lanes.append(GlooLane(made, place, len(ranks), averages=False))
        return self._lanes[-1]


def _leave_with_starter(store: GuardedStore) -> None:
    """End this process when the starter is gone: nobody would give it a rank again."""
    while True:
        try:
            store.wait(["never set"], _ASK_AGAIN)
        except dist.DistStoreError:
            continue  # an hour has passed
        except dist.DistNetworkError:
            os._exit(1)
