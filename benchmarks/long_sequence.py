"""Trains with context = 4 on a sequence four times longer than one rank's limit.

    OMP_NUM_THREADS=1 mpiexec -n 4 python benchmarks/long_sequence.py [--length 1024] [--method ring]

The limit is on activation memory: the bytes of tensors that a training step (forward, backward, gradient sums, AdamW) makes and
that are alive at once, on one rank. Parameters, gradients and optimizer state exist before and do not count. The limit is the
need of one rank for a sequence of `--length` tokens plus a quarter. It is enforced: the operator that exceeds it raises
MemoryError. Prints the peak of each rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import training_step
from live_bytes import LiveBytes
from torch.distributed.device_mesh import init_device_mesh

import hpctrain.mpi
from hpctrain.checking.check import check
from hpctrain.job.raw import RawJob
from hpctrain.model.mesh import Meshes, build_meshes, layout_of

CONTEXT, ROOM = 4, 1.25
MODEL = {"name": "gpt", "hidden_size": 128, "layers": 4, "attention_heads": 4, "vocab_size": 256}


def make_step(length: int, parallelism: dict[str, Any]) -> Callable[[], float]:
    """A training step on one sequence, which returns this rank's part of the mean loss."""
    tables: dict[str, Any] = {
        "job": {"name": "long", "steps": 1}, "model": {**MODEL, "max_seq_length": length},
        "dataset": {"name": "synthetic"}, "optimizer": {"name": "adamw", "lr": 1e-3},
        "batch": {"global_size": 1, "micro_size": 1}, "precision": {"mode": "fp32"}, "parallelism": parallelism,
    }  # fmt: skip
    checked = check(RawJob(tables, {}, "benchmark"), dist.get_world_size() if parallelism else None)
    if parallelism:
        meshes = build_meshes(layout_of(checked.job, checked.parts, dist.get_world_size()), training_step.CPU)
    else:  # each rank by itself
        axes = ("ranks", "dp_replicate", "dp_shard")
        alone = init_device_mesh("cpu", (dist.get_world_size(), 1, 1), mesh_dim_names=axes)
        meshes = Meshes(alone, alone, axes[1:], {})
    ids = torch.randint(256, (1, length + 1), generator=torch.Generator().manual_seed(length))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    return training_step.make_step(checked, meshes, batch, length)


def measure(length: int, parallelism: dict[str, Any], limit: int | None) -> tuple[int, float]:
    """This rank's peak in the second step, and its part of that step's loss. Raises MemoryError above `limit`."""
    step = make_step(length, parallelism)
    step()  # the first step creates the optimizer's state and the communication buffers
    with LiveBytes(limit) as live:
        loss = step()
    return live.peak, loss


def everyone(value: float) -> list[float]:
    found = [0.0] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--method", choices=["ring", "ulysses"], default="ring")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(hpctrain.mpi.BACKEND, init_method="mpi://")
    if dist.get_world_size() != CONTEXT:
        raise SystemExit(f"expected {CONTEXT} ranks, found {dist.get_world_size()}")
    short, long = arguments.length, CONTEXT * arguments.length
    lines = []
    peak, _ = measure(short, {}, None)
    limit = round(ROOM * peak)
    lines.append(f"one rank, {short} tokens: peak {peak / 1e6:.1f} MB; the limit is {limit / 1e6:.1f} MB")
    needed, expected = measure(long, {}, None)
    try:
        measure(long, {}, limit)
        lines.append(f"one rank, {long} tokens: fits, which should not be")
    except MemoryError as error:
        lines.append(f"one rank, {long} tokens: MemoryError, {error} (without one: peak {needed / 1e6:.1f} MB)")
    context = {"context": {"size": CONTEXT, "method": arguments.method}}
    mine, part = measure(long, context, limit)
    peaks = ", ".join(f"{value / 1e6:.1f}" for value in everyone(mine))
    lines.append(f"context = {CONTEXT} ({arguments.method}), {long} tokens: trains; peaks per rank {peaks} MB")
    lines.append(
        f"loss of that step {sum(everyone(part)) / long:.6f}, of one rank without a limit {expected / long:.6f}"
    )
    if dist.get_rank() == 0:
        print("\n".join(lines), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
