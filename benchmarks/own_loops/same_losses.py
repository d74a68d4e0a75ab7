"""Checks that the loops with Accelerate and Fabric train as ours do: the losses of six steps in float32 on one process.

    python benchmarks/own_loops/same_losses.py [NAME ...] [--micro-size 8] [--ranks 2]

Each of the others is started twice, for three steps and then for six, so that a checkpoint and a resume lie between; it takes the
samples in the order of our loop. --ranks: of the others; ours has one. Prints the largest difference of each; ends
with 1 where one is above a hundred-thousandth.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import count
import torch

import hpctrain

STEPS, GLOBAL_SIZE = 6, 24
TOLERANCE = 1e-5
FEED = """
import json, runpy, sys
from torch.utils.data import DistributedSampler, RandomSampler
order = json.loads(sys.argv[1])
RandomSampler.__iter__ = lambda sampler: iter(order)
DistributedSampler.__iter__ = lambda sampler: iter(order[sampler.rank :: sampler.num_replicas])
ranks = int(sys.argv[2])
sys.argv = sys.argv[3:]
made = runpy.run_path(sys.argv[0], run_name="__main__")
assert ranks == (made["accelerator"].num_processes if "accelerator" in made else made["fabric"].world_size)
"""
"""Runs a program whose loaders shuffle into a given order, and sees that its library knows of all ranks."""
LAUNCHERS = {
    "accelerate": "-m torch.distributed.run --standalone --nproc-per-node {ranks}",
    "fabric": "-m lightning.fabric.cli --accelerator cpu --devices {ranks}",
}


def data_of(name: str) -> list[Any]:
    """The samples of our loop: what its program defines before the loop."""
    tree = ast.parse(count.versions(name)[0].read_text())
    tree.body = [node for node in tree.body if not isinstance(node, ast.With)]
    defined: dict[str, Any] = {}
    exec(compile(tree, name, "exec"), defined)
    return list(defined.get("DATA", []))


def order_of_samples(directory: Path, name: str) -> list[int]:
    """The numbers of the samples that our loop trains on, in its order, which depends on the samples."""
    data = data_of(name)
    if not data:
        return []
    firsts = torch.stack([one[0] if isinstance(one, tuple) else one for one in data])
    job = {"job": {"name": "order", "steps": STEPS, "output_dir": str(directory / "order" / name)}}
    batch, found = {"global_size": GLOBAL_SIZE, "micro_size": GLOBAL_SIZE}, list[int]()
    with hpctrain.own_loop(job, dataset={"name": data}, batch=batch) as loop:
        net = torch.nn.Linear(1, 1)
        loop.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for step in loop.steps():
            for samples in step:
                rows = samples if isinstance(samples, torch.Tensor) else samples[0]
                found += [int((firsts == row).all(1).nonzero()) for row in rows]
    return found


def run(directory: Path, *words: object) -> None:
    """Run a program of Python's; its words are shown if it fails."""
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}  # without it, Accelerate's ranks on CPUs are alone
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{words}\n{done.stdout}{done.stderr}")


def our_losses(directory: Path, name: str, micro_size: int) -> list[dict[str, float]]:
    """The losses of each step of our loop."""
    job = directory / f"{name}.toml"
    job.write_text(count.job_of(name).replace(f"micro_size = {GLOBAL_SIZE}", f"micro_size = {micro_size}"))
    run(directory, count.versions(name)[0], job)
    rows = map(json.loads, (directory / "runs" / name / "metrics.jsonl").read_text().splitlines())
    return [{key: row[key] for key in ("loss", "loss_discriminator", "reward") if key in row} for row in rows]


def their_losses(
    directory: Path, library: str, name: str, sizes: tuple[int, int], order: Sequence[int]
) -> list[dict[str, float]]:
    """The losses of each step of another library's loop, interrupted after half of the steps. sizes: micro batch, ranks."""
    micro_size, ranks = sizes
    launcher = LAUNCHERS[library].format(ranks=ranks).split()
    feed = directory / "feed.py"
    feed.write_text(FEED)
    output, program = directory / library / name, count.HERE / library / f"{name}.py"
    given = () if name == "ppo" else (GLOBAL_SIZE, micro_size)
    for begin, end in ((0, STEPS // 2), (STEPS // 2, STEPS)):
        rest = json.dumps(order[begin * GLOBAL_SIZE :])
        run(directory, *launcher, feed, rest, ranks, program, output, end, *given)
    return of_tensorboard(output) if library == "accelerate" else of_csv(output)


def of_tensorboard(directory: Path) -> list[dict[str, float]]:
    """The rows of a directory of Accelerate's tracker."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    events = EventAccumulator(str(directory / "logs"))
    events.Reload()
    values = {key: [one.value for one in events.Scalars(key)] for key in events.Tags()["scalars"]}
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def of_csv(directory: Path) -> list[dict[str, float]]:
    """The rows of a directory of Fabric's logger, which has a file for each start."""
    files = sorted((directory / "logs").glob("version_*/metrics.csv"))
    rows = [row for file in files for row in csv.DictReader(file.read_text().splitlines())]
    return [{key: float(value) for key, value in row.items() if key != "step"} for row in rows]


def difference(ours: Sequence[dict[str, float]], theirs: Sequence[dict[str, float]]) -> float:
    """The largest relative difference; infinite where a row or a key is missing."""
    if [set(row) for row in ours] != [set(row) for row in theirs]:
        return float("inf")
    return max(abs(theirs[at][key] / row[key] - 1) for at, row in enumerate(ours) for key in row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=count.NAMES)
    parser.add_argument("--micro-size", type=int)
    parser.add_argument("--ranks", type=int, default=1)
    given = parser.parse_args()
    sizes = (given.micro_size or GLOBAL_SIZE // given.ranks, given.ranks)
    worst = 0.0
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        for name in given.names:
            order = order_of_samples(directory, name)
            ours = our_losses(directory, name, sizes[0])
            for library in ("accelerate", "fabric"):
                found = difference(ours, their_losses(directory, library, name, sizes, order))
                print(f"{name:16} {library:10} {len(ours)} steps, largest difference {found:.1e}", flush=True)
                worst = max(worst, found)
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
