"""Measures the time that `[communicator] check = true` adds to a collective.

    mpiexec -n 2 python benchmarks/comparison.py

Compared and plain calls alternate; the medians of ROUNDS calls each are shown, of the slowest rank.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from hpctrain.ranks.backends import gloo_backend, mpi_backend
from hpctrain.ranks.watchdog.comparison import compared

ROUNDS = 300
SIZES = {"4 KB": 1024, "1 MB": 2**18, "16 MB": 2**22}


def median_seconds(tensor: torch.Tensor, groups: list[dist.ProcessGroup]) -> list[float]:
    """The median of an all-reduce in each group, in turns."""
    times: list[list[float]] = [[] for _ in groups]
    for _ in range(ROUNDS if tensor.numel() < 2**20 else ROUNDS // 10):
        for group, of_group in zip(groups, times, strict=True):
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            of_group.append(time.perf_counter() - begin)
    medians = torch.tensor([statistics.median(of_group) for of_group in times])
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return [float(one) for one in medians]


def main() -> None:
    dist.init_process_group(mpi_backend(), init_method="mpi://")
    for name, backend in (("mpi", f"cpu:{mpi_backend()}"), ("gloo", gloo_backend())):
        wrapped, options = compared(backend, None)
        groups = [dist.new_group(backend=backend), dist.new_group(backend=wrapped, pg_options=options)]
        for size, elements in SIZES.items():
            plain, checked = median_seconds(torch.zeros(elements), groups)
            if dist.get_rank() == 0:
                print(
                    f"{name:4} all_reduce of {size:>5}: {plain * 1e6:6.0f} us, compared {checked * 1e6:6.0f} us: "
                    f"{(checked - plain) * 1e6:+5.0f} us, {checked / plain:.2f} times",
                    flush=True,
                )
        for group in groups:
            dist.destroy_process_group(group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
