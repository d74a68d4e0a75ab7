"""Measures a step of a program's own loop against a step of `hpctrain run` on the same job: an MLP on classes, with AdamW.

    OMP_NUM_THREADS=1 python benchmarks/own_loop_speed.py [--ranks 1] [--rounds 3] [--steps 150] [--json]

Both trainings of a round are there at the same time and take steps in turns: rank 0 waits in a hook until the other one's step is
done. So a machine that is slow for a while is slow for both steps of a pair. A step's time is that from one such wait to the
next, with all that is between two steps; the first ones are left out. Prints, for each number of ranks, the medians of both, the
median ratio of a pair, own loop to run, with its quartiles, and the median of each round. Ends with 1 if the losses differ. Several
ranks need cores for both trainings: a rank that waits for the others may keep its core busy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FIRST = 10
"""Steps that are left out."""
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
[plugins]
load = ["turns"]
"""
TURNS = """
import json
import os
import time
from contextlib import suppress

from hpctrain.api import hookimpl

mine, other = (os.environ[name] for name in ("MINE", "OTHER"))
pipes, seconds = [], []


@hookimpl
def hpctrain_job_start(identity, step):
    if identity.rank == 0:
        kinds = (mine, "rb"), (other, "wb")
        pipes.extend(open(path, kind, buffering=0) for path, kind in (kinds if os.environ["FIRST"] == "0" else kinds[::-1]))
        if os.environ["FIRST"] == "1":
            pipes.reverse()
        else:
            pipes[0].read(1)
        seconds.append(time.perf_counter())


@hookimpl
def hpctrain_step_end(step):
    if pipes:
        now = time.perf_counter()
        seconds[-1] = now - seconds[-1]
        pipes[1].write(b".")
        pipes[0].read(1)
        seconds.append(time.perf_counter())


@hookimpl
def hpctrain_job_end():
    if pipes:
        with suppress(BrokenPipeError):  # the other one has ended
            pipes[1].write(b".")
        print("SECONDS " + json.dumps(seconds[:-1]), flush=True)
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


def measure(directory: Path, ranks: int, rounds: int, steps: int) -> dict[str, Any]:
    """The times of pairs of steps, and the largest difference of a loss."""
    pairs: list[list[tuple[float, float]]] = []
    differ = 0.0
    for number in range(rounds):
        with tempfile.TemporaryDirectory(dir=directory) as output:
            found = train(directory, Path(output), ranks, steps, number % 2)
        (own, own_losses), (run, run_losses) = (found[kind] for kind in ("own", "run"))
        pairs.append(list(zip(own[FIRST:], run[FIRST:], strict=True)))
        differ = max(differ, *(abs(one - two) for one, two in zip(own_losses, run_losses, strict=True)))
    both = [pair for of_round in pairs for pair in of_round]
    low, middle, high = statistics.quantiles([own / run for own, run in both], n=4)
    return {
        "ranks": ranks,
        "own_ms": round(statistics.median(own for own, _ in both) * 1e3, 2),
        "run_ms": round(statistics.median(run for _, run in both) * 1e3, 2),
        "ratio": round(middle, 4),
        "quartiles": [round(low, 4), round(high, 4)],
        "rounds": [round(statistics.median(own / run for own, run in of_round), 4) for of_round in pairs],
        "losses_differ": differ,
    }


def train(
    directory: Path, output: Path, ranks: int, steps: int, first: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds and loss of each step of both kinds, on `ranks` ranks under mpiexec, or alone. first: which takes the first step."""
    launcher = [str(Path(sys.executable).parent / "mpiexec"), "-n", str(ranks)] if ranks > 1 else []
    for kind in KINDS:
        os.mkfifo(output / f"to-{kind}")
        filled = (
            JOB.replace("STEPS", str(steps)).replace("OUTPUT", str(output / kind)).replace("GLOBAL", str(64 * ranks))
        )
        (output / f"{kind}.toml").write_text(filled)
    begun = {}
    for number, (kind, words) in enumerate(KINDS.items()):
        other = next(one for one in KINDS if one != kind)
        turns = {"MINE": f"{output}/to-{kind}", "OTHER": f"{output}/to-{other}", "FIRST": str(int(number == first))}
        begun[kind] = subprocess.Popen(
            [*launcher, sys.executable, *words, f"{output}/{kind}.toml"],
            cwd=directory, env={**os.environ, **turns}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    found = {}
    for kind, one in begun.items():
        told, _ = one.communicate(timeout=600)
        if one.returncode:
            raise SystemExit(told)
        seconds = next(line.partition("SECONDS ")[2] for line in told.splitlines() if "SECONDS " in line)
        rows = [json.loads(line) for line in (output / kind / "metrics.jsonl").read_text().splitlines()]
        found[kind] = (json.loads(seconds), [row["loss"] for row in rows])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--depth", type=int, default=6, help="layers of a million parameters")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each number of ranks")
    given = parser.parse_args()
    differ = 0.0
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        (directory / "net.py").write_text(NET.replace("DEPTH", str(given.depth)))
        (directory / "loop.py").write_text(PROGRAM)
        (directory / "turns.py").write_text(TURNS)
        for ranks in map(int, given.ranks.split(",")):
            found = measure(directory, ranks, given.rounds, given.steps)
            differ = max(differ, found["losses_differ"])
            print(json.dumps(found) if given.json else told(found), flush=True)
    return int(differ > 1e-6)


def told(found: dict[str, Any]) -> str:
    """A line of words."""
    low, high = found["quartiles"]
    return (
        f"{found['ranks']} ranks: run {found['run_ms']} ms, own loop {found['own_ms']} ms, ratio of a pair {found['ratio']} "
        f"({low} - {high}; rounds {found['rounds']}), losses differ by {found['losses_differ']:.0e}"
    )


if __name__ == "__main__":
    sys.exit(main())
