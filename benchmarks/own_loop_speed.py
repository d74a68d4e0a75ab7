"""Measures a step of a program's own loop against a step of `hpctrain run` on the same job: an MLP on classes, with AdamW.

    OMP_NUM_THREADS=1 python benchmarks/own_loop_speed.py [--ranks 1,2] [--rounds 9] [--steps 25] [--json]

A round is a pair of trainings, which begin in turns. A step's time is that between two rows of metrics.jsonl, so all between two
steps is in it; the first ones are left out. Prints, for each number of ranks, the medians of both and the ratio of a round's
medians, own loop to run: the median over the rounds, and the quartiles. Ends with 1 if the losses differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

FIRST = 4
"""Rows that are left out."""
JOB = """
[job]
name = "speed"
steps = STEPS
output_dir = "OUTPUT"
[model]
name = "net:build"
loss = "torch.nn.functional:cross_entropy"
[dataset]
name = "net:data"
[optimizer]
name = "adamw"
lr = 1e-4
[batch]
global_size = GLOBAL
micro_size = 32
[checkpoint]
every_steps = 0
"""
NET = """
import torch
from torch import nn


def build():
    sizes = [1024] * DEPTH
    return nn.Sequential(*(layer for size in sizes for layer in (nn.Linear(size, size), nn.GELU())), nn.Linear(1024, 10))


def data(split):
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(2048, 1024, generator=draw)
    return list(zip(rows, torch.randint(10, (2048,), generator=draw))) if split == "train" else None
"""
PROGRAM = """
import sys

import hpctrain
from torch.nn.functional import cross_entropy

with hpctrain.own_loop(sys.argv[1]) as loop:
    model, optimizer = loop.setup()
    for step in loop.steps():
        for rows, classes in step:
            loop.backward(cross_entropy(model(rows), classes))
        optimizer.step()
        optimizer.zero_grad()
"""
KINDS = {"run": ("-m", "hpctrain", "run"), "own": ("loop.py",)}


def train(directory: Path, kind: str, ranks: int, steps: int) -> list[dict[str, Any]]:
    """The rows of a training on `ranks` ranks under mpiexec, or alone."""
    launcher = [str(Path(sys.executable).parent / "mpiexec"), "-n", str(ranks)] if ranks > 1 else []
    with tempfile.TemporaryDirectory(dir=directory) as output:
        job = Path(output) / "job.toml"
        job.write_text(JOB.replace("STEPS", str(steps)).replace("OUTPUT", output).replace("GLOBAL", str(64 * ranks)))
        words = [*launcher, sys.executable, *KINDS[kind], str(job)]
        done = subprocess.run(words, cwd=directory, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        return [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]


def step_seconds(rows: Sequence[dict[str, Any]]) -> float:
    """The median time between two rows."""
    times = [float(row["time"]) for row in rows[FIRST:]]
    return statistics.median(second - first for first, second in pairwise(times))


def measure(directory: Path, ranks: int, rounds: int, steps: int) -> dict[str, Any]:
    """Both kinds in turns, `rounds` times."""
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    losses: dict[str, list[float]] = {}
    for number in range(rounds):
        for kind in list(KINDS) if number % 2 == 0 else list(KINDS)[::-1]:
            rows = train(directory, kind, ranks, steps)
            seconds[kind].append(step_seconds(rows))
            losses[kind] = [row["loss"] for row in rows]
    ratios = [own / run for own, run in zip(seconds["own"], seconds["run"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
    return {
        "ranks": ranks,
        **{f"{kind}_ms": round(statistics.median(of_kind) * 1e3, 2) for kind, of_kind in seconds.items()},
        "ratio": round(middle, 4),
        "quartiles": [round(low, 4), round(high, 4)],
        "losses_differ": max(abs(own - run) for own, run in zip(losses["own"], losses["run"], strict=True)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--depth", type=int, default=6, help="layers of a million parameters")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each number of ranks")
    given = parser.parse_args()
    differ = 0.0
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        (directory / "net.py").write_text(NET.replace("DEPTH", str(given.depth)))
        (directory / "loop.py").write_text(PROGRAM)
        for ranks in map(int, given.ranks.split(",")):
            found = measure(directory, ranks, given.rounds, given.steps)
            differ = max(differ, found["losses_differ"])
            print(json.dumps(found) if given.json else told(found), flush=True)
    return int(differ > 1e-6)


def told(found: dict[str, Any]) -> str:
    """A line of words."""
    low, high = found["quartiles"]
    return (
        f"{found['ranks']} ranks: run {found['run_ms']} ms, own loop {found['own_ms']} ms, ratio {found['ratio']} "
        f"({low} - {high}), losses differ by {found['losses_differ']:.0e}"
    )


if __name__ == "__main__":
    sys.exit(main())
