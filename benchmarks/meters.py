"""Measures the share of a step that measurements and loggers take.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/meters.py [--steps N] [--layers N]

A GPT of 29 million parameters (8 layers) trains with every meter, TensorBoard, CSV and Prometheus. In every second step nothing is
measured, and its row goes nowhere. Each step is compared with the one before; the medians of three parts of the run are shown, of
rank 0, and the seconds that meters and loggers take themselves.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from typing import Any

import torch
from mpi4py import MPI

import hpctrain
from hpctrain.training.meters.meters import Meters, Traffic
from hpctrain.training.report import Report

PARTS = 3


class Turns:
    """Lets the meters and the records of a run work in every second step."""

    def __init__(self) -> None:
        self.is_on, self.ends, self.own = True, list[float](), [0.0]  # before the first step
        self._figures, self._row, self._traffic = Meters.figures, Meters.row, Traffic.take
        self._report: Any = Report.row

    def install(self) -> None:
        """Stand between the loop and its meters."""
        turns = self

        def figures(meters: Meters, *arguments: Any) -> dict[str, Any]:
            begin = time.perf_counter()
            found = turns._figures(meters, *arguments)
            turns.own.append(time.perf_counter() - begin)
            return found if turns.is_on else {}

        def row(meters: Meters, *arguments: Any) -> dict[str, Any]:
            begin = time.perf_counter()
            found = turns._row(meters, *arguments) if turns.is_on else {}
            turns.own[-1] += time.perf_counter() - begin
            return found

        def traffic(meters: Traffic) -> dict[str, Any]:
            begin = time.perf_counter()
            found = turns._traffic(meters) if turns.is_on else {}
            turns.own[-1] += time.perf_counter() - begin
            return found

        def report(one: Report, *arguments: Any) -> None:
            begin = time.perf_counter()
            if turns.is_on:
                turns._report(one, *arguments)
            turns.own[-1] += time.perf_counter() - begin
            turns.ends.append(time.perf_counter())
            turns.is_on = not turns.is_on

        for owner, name, replacement in (
            (Meters, "figures", figures), (Meters, "row", row), (Traffic, "take", traffic), (Report, "row", report),
        ):  # fmt: skip
            setattr(owner, name, replacement)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    turns = Turns()
    turns.install()
    world = MPI.COMM_WORLD
    directory = world.bcast(tempfile.mkdtemp() if world.rank == 0 else None)
    try:
        hpctrain.run(
            {
                "job": {"name": "meters", "steps": arguments.steps + 3, "output_dir": directory},
                "model": {
                    "name": "gpt", "hidden_size": 512, "layers": arguments.layers, "attention_heads": 8, "vocab_size": 4096,
                    "max_seq_length": 128,
                },
                "dataset": {"name": "synthetic"},
                "optimizer": {"name": "adamw", "lr": 1e-4},
                "batch": {"global_size": 8, "micro_size": 4},
                "logger": [{"name": "tensorboard"}, {"name": "csv"}, {"name": "prometheus", "host": "127.0.0.1"}],
            }
        )  # fmt: skip
    finally:
        if world.rank == 0:
            shutil.rmtree(directory)
    if world.rank:
        return
    seconds = [end - begin for begin, end in zip(turns.ends, turns.ends[1:], strict=False)][1:]
    own = turns.own[3:]
    # step by step: on, off, on, ...; the first of these, the third step, is on
    pairs = [(seconds[i] / seconds[i + 1], own[i] / seconds[i]) for i in range(0, len(seconds) - 1, 2)]
    parts = [pairs[i * len(pairs) // PARTS : (i + 1) * len(pairs) // PARTS] for i in range(PARTS)]
    ratios = [statistics.median(ratio for ratio, _ in part) for part in parts]
    shares = [statistics.median(share for _, share in part) for part in parts]
    print(
        f"a step of {statistics.median(seconds) * 1e3:.0f} ms: with measurements and loggers {min(ratios):.3f} - {max(ratios):.3f} "
        f"of one without; they take {min(shares):.2%} - {max(shares):.2%} themselves",
        flush=True,
    )


if __name__ == "__main__":
    main()
