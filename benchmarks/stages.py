"""Measures the cost of sharding stages: the step of a 29 M-parameter GPT under stages 0 to 3, relative to the same work alone.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/stages.py [--precision fp32 bf16] [--kinds 0 1 2 3] [--rounds N]

A kind is a stage, optionally with options: `--kinds "1 overlap_communication=true" "2 reduce_bucket_size='25MB'"`. In every
round each kind takes a step, and so does "alone": each rank by itself, with stage 0's code and no communication. A round's ratio
is the kind's time divided by the time of "alone", each of the slowest rank. The rounds are cut into three parts, and the best and
the worst of the three medians are printed. Forward, backward, communication and update are timed; data, norm and metrics are not.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import tomli
import torch
import torch.distributed as dist
import training_step
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hpctrain.mpi
from hpctrain.checking.check import check
from hpctrain.job.raw import RawJob
from hpctrain.model.mesh import Meshes

VOCABULARY, SEQUENCE = 4096, 128
MODEL = {
    "name": "gpt", "hidden_size": 512, "layers": 8, "attention_heads": 8, "vocab_size": VOCABULARY,
    "max_seq_length": SEQUENCE,
}  # fmt: skip
BATCH = 4  # per rank
PARTS = 3


def make_step(kind: str, precision: str, mesh: DeviceMesh, batch: dict[str, torch.Tensor]) -> Callable[[], float]:
    """Make a training step of a kind on `mesh`."""
    stage, _, options = kind.partition(" ")
    tables: dict[str, Any] = {
        "job": {"name": "stages", "steps": 1}, "model": MODEL, "dataset": {"name": "synthetic"},
        "optimizer": {"name": "adamw", "lr": 1e-4}, "batch": {"global_size": BATCH, "micro_size": BATCH},
        "precision": {"mode": precision}, "sharding": {"stage": int(stage), **tomli.loads("\n".join(options.split()))},
    }  # fmt: skip
    divisor = BATCH * SEQUENCE * mesh["dp_replicate"].size() * mesh["dp_shard"].size()
    return training_step.make_step(
        check(RawJob(tables, {}, "benchmark"), None),
        Meshes(mesh, mesh, ("dp_replicate", "dp_shard"), {}),
        batch,
        divisor,
    )


def measure(steps: dict[str, Callable[[], float]], rounds: int) -> torch.Tensor:
    """Seconds of the slowest rank: (rounds, kinds), after two uncounted rounds."""
    seconds = torch.zeros(rounds + 2, len(steps), dtype=torch.float64)
    for number in range(rounds + 2):
        for kind, step in enumerate(steps.values()):
            dist.barrier()
            begin = time.perf_counter()
            step()
            seconds[number, kind] = time.perf_counter() - begin
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--kinds", nargs="+", default=["0", "1", "2", "3"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", action="store_true", help="print a JSON object per precision")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(hpctrain.mpi.BACKEND, init_method="mpi://")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    alone = init_device_mesh("cpu", (ranks, 1, 1), mesh_dim_names=("ranks", "dp_replicate", "dp_shard"))
    meshes = {
        True: init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("dp_replicate", "dp_shard")),
        False: init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp_replicate", "dp_shard")),
    }
    ids = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(rank))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    for precision in arguments.precision:
        steps = {"alone": make_step("0", precision, alone, batch)}
        steps |= {kind: make_step(kind, precision, meshes[kind.startswith("0")], batch) for kind in arguments.kinds}
        seconds = measure(steps, arguments.rounds)
        result: dict[str, Any] = {"precision": precision, "ranks": ranks}
        for number, kind in enumerate(steps):
            ratios = [part.median().item() for part in (seconds[:, number] / seconds[:, 0]).chunk(PARTS)]
            milliseconds = round(seconds[:, number].median().item() * 1e3)
            result[kind] = {"ratio": round(min(ratios), 4), "worst": round(max(ratios), 4), "ms": milliseconds}
        if rank == 0 and arguments.json:
            print(json.dumps(result), flush=True)
        elif rank == 0:
            for kind in steps:
                print(f"{precision}  {kind:40}  {result[kind]['ratio']:.3f} - {result[kind]['worst']:.3f}", flush=True)
        del steps
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
