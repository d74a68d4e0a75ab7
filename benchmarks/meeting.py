"""Measures the cost of the guarded store when ranks meet, relative to torch's TCPStore, which has no protection.

    mpiexec -n 32 python benchmarks/meeting.py [--rounds N] [--json]

Each round opens a store, exchanges the values of a job's start in it (the job, a report of each rank, a verdict), and makes a
gloo group in it. The two stores take turns. Prints the medians over the rounds of the slowest rank's seconds, and their difference.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from hpctrain.base.store.gloo import BACKEND
from hpctrain.mpi.all_ranks import broadcast_json, gather_json
from hpctrain.mpi.library import MPI
from hpctrain.mpi.rendezvous import open_over_mpi

TIMEOUT = timedelta(minutes=2)
JOB = "x" * 4000
REPORT = "y" * 1500


def open_tcp_store() -> Store:
    """torch's TCPStore, on rank 0's loopback interface."""
    comm = MPI.COMM_WORLD
    store = None
    if comm.rank == 0:
        store = TCPStore("127.0.0.1", 0, comm.size, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    port = broadcast_json(comm, None if store is None else store.port)
    return store or TCPStore("127.0.0.1", port, comm.size, is_master=False, timeout=TIMEOUT)


def meet(open_store: Callable[[], Store], backend: str) -> dict[str, float]:
    """Seconds of this rank: to open a store, to agree in it, to make a group."""
    comm = MPI.COMM_WORLD
    rank, size = comm.rank, comm.size
    comm.Barrier()
    begin = time.perf_counter()
    store = open_store()
    opened = time.perf_counter()
    if rank == 0:
        store.set("job", JOB)
    store.get("job")
    store.set(f"report/{rank}", REPORT)
    if rank == 0:
        for other in range(size):
            store.get(f"report/{other}")
        store.set("verdict", "{}")
    store.get("verdict")
    agreed = time.perf_counter()
    dist.init_process_group(backend, store=PrefixStore("group", store), rank=rank, world_size=size, timeout=TIMEOUT)
    made = time.perf_counter()
    comm.Barrier()
    dist.destroy_process_group()
    comm.Barrier()
    if hasattr(store, "close"):
        store.close()
    return {"open": opened - begin, "agree": agreed - opened, "group": made - agreed, "all": made - begin}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    ways: dict[str, Callable[[], dict[str, float]]] = {
        "TCPStore": lambda: meet(open_tcp_store, "gloo"),
        "guarded": lambda: meet(lambda: open_over_mpi(TIMEOUT), BACKEND),
    }
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for number in range(arguments.rounds + 1):
        for name, way in ways.items():
            ranks = gather_json(MPI.COMM_WORLD, way())
            if number:  # the first round also loads common modules
                taken[name].append({part: max(one[part] for one in ranks) for part in ranks[0]})
    if MPI.COMM_WORLD.rank:
        return
    medians = {
        name: {part: statistics.median(one[part] for one in rounds) for part in rounds[0]}
        for name, rounds in taken.items()
    }
    more = {part: medians["guarded"][part] - medians["TCPStore"][part] for part in medians["guarded"]}
    rows = {**medians, "difference": more}
    if arguments.json:
        print(json.dumps({"ranks": MPI.COMM_WORLD.size, **rows}))
        return
    print(f"{MPI.COMM_WORLD.size} ranks, seconds of the slowest")
    for name, parts in rows.items():
        print(f"{name:12}", *(f"{part} {seconds:8.4f}" for part, seconds in parts.items()))


if __name__ == "__main__":
    main()
