"""Measures collectives on the ranks of this job: this backend, gloo, and plain mpi4py on numpy buffers.

    mpiexec -n 2 python benchmarks/collectives.py [--backends mpi,gloo,mpi4py]

all_reduce, all_gather and reduce_scatter at 4 KB, 1 MB and 64 MB: medians and quartiles, and the ratio to plain mpi4py.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from hpctrain_tools.bench import Spread, spread

from hpctrain.mpi.all_ranks import gather_json
from hpctrain.mpi.library import MPI
from hpctrain.mpi.process_group import BACKEND

BACKENDS = ("mpi", "gloo", "mpi4py")
OPERATIONS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
SIZES = (4 * 1024, 2**20, 64 * 2**20)  # bytes
_WARMUP = 3  # repetitions at the start of each turn: the previous backend has left its threads and caches behind
_TURN = 10  # repetitions


@dataclass(frozen=True)
class CollectiveTiming:
    """A measurement. nbytes: size of the reduced tensor, of the gathered output, or of the scattered input.
    seconds, low, high: the slowest rank's median over the repetitions, and its quartiles. ratio: to the reference's seconds in the
    same turns: MPI's own where it is measured, else the first backend's.
    """

    operation: str
    backend: str
    nbytes: int
    seconds: float
    low: float
    high: float
    ratio: float


def measure(backends: Sequence[str], repetitions: int = 50) -> list[CollectiveTiming]:
    """Time synchronous float32 collectives over the whole world. Collective; needs an initialised torch.distributed.

    backends: names from BACKENDS; "mpi" is this package, "mpi4py" is MPI itself. The backends take turns of a few repetitions
    each, so that a busy machine slows all of them alike.
    """
    unit = 4 * dist.get_world_size()
    rows = []
    with ExitStack() as groups:
        members = {name: groups.enter_context(_group(name)) for name in backends}
        for operation in OPERATIONS:
            for nbytes in (size // unit * unit for size in SIZES):
                calls = {name: _call(operation, group, nbytes) for name, group in members.items()}
                found = _spreads(calls, repetitions)
                reference = found["mpi4py" if "mpi4py" in found else backends[0]].median
                rows += [
                    CollectiveTiming(operation, name, nbytes, *of_backend, of_backend.median / reference)
                    for name, of_backend in found.items()
                ]
    return rows


@contextmanager
def _group(backend: str) -> Iterator[dist.ProcessGroup | MPI.Intracomm]:
    if backend == "mpi4py":
        comm = MPI.COMM_WORLD.Dup()
        yield comm
        comm.Free()
    else:
        group = dist.new_group(backend=BACKEND if backend == "mpi" else backend)
        assert isinstance(group, dist.ProcessGroup)  # of all ranks
        yield group
        dist.destroy_process_group(group)


def _call(operation: str, group: dist.ProcessGroup | MPI.Intracomm, nbytes: int) -> Callable[[], object]:
    elements = nbytes // 4
    piece = elements // dist.get_world_size()
    full, share = torch.zeros(elements), torch.zeros(piece)
    if isinstance(group, MPI.Intracomm):
        # The same kind of memory for all backends: numpy's own uses huge pages, and its zeros get no pages until written.
        whole, part = full.numpy(), share.numpy()
        return {
            "all_reduce": lambda: group.Allreduce(MPI.IN_PLACE, whole),
            "all_gather_into_tensor": lambda: group.Allgather(part, whole),
            "reduce_scatter_tensor": lambda: group.Reduce_scatter_block(whole, part),
        }[operation]
    return {
        "all_reduce": lambda: dist.all_reduce(full, group=group),
        "all_gather_into_tensor": lambda: dist.all_gather_single(full, share, group=group),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_single(share, full, group=group),
    }[operation]


def _spreads(calls: dict[str, Callable[[], object]], repetitions: int) -> dict[str, Spread]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    while any(len(values) < repetitions for values in times.values()):
        for name, call in calls.items():
            for repetition in range(_WARMUP + _TURN):
                MPI.COMM_WORLD.Barrier()
                start = time.perf_counter()
                call()
                if repetition >= _WARMUP:
                    times[name].append(time.perf_counter() - start)
    ranks = gather_json(MPI.COMM_WORLD, {name: spread(taken) for name, taken in times.items()})
    return {name: max(Spread(*of_rank[name]) for of_rank in ranks) for name in times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default=",".join(BACKENDS))
    names = parser.parse_args().backends.split(",")
    if not {*names} <= {*BACKENDS}:
        parser.error(f"--backends: expected some of {', '.join(BACKENDS)}, with commas")
    torch.set_num_threads(1)
    dist.init_process_group(BACKEND, init_method="mpi://")
    rows = measure(names)
    for row in rows if dist.get_rank() == 0 else ():
        quartiles = f"{row.low * 1e6:,.1f} - {row.high * 1e6:,.1f}"
        told = f"{row.seconds * 1e6:12,.1f} us ({quartiles})  x{row.ratio:.2f}"
        print(f"{row.operation:24} {row.nbytes:>10,} B  {row.backend:8} {told}")


if __name__ == "__main__":
    main()
