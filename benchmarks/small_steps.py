"""Measures a step of a small network: OMP_NUM_THREADS=1 python benchmarks/small_steps.py [--rounds N]

An MLP of 17,226 parameters on 4,096 samples of 64 numbers, AdamW, clipping, one rank, by `hpctrain run`, an own loop and a plain
loop with torch's DataLoader, in turns. Milliseconds a step, the quickest round of each, and their ratio to the plain loop.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hpctrain

WARM = 20
"""Steps before the time begins."""


def network() -> nn.Module:
    """An MLP."""
    return nn.Sequential(nn.Linear(64, 106), nn.ReLU(), nn.Linear(106, 84), nn.ReLU(), nn.Linear(84, 10))


def samples(split: str = "train") -> TensorDataset | None:
    """Random numbers with labels."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4096, 64, generator=generator)
    return TensorDataset(inputs, torch.randint(10, (4096,), generator=generator)) if split == "train" else None


def plain(batch: int, steps: int) -> float:
    """Seconds of the steps of a plain loop."""
    module, data = network(), samples()
    assert data is not None
    optimizer, loader, done, begin = torch.optim.AdamW(module.parameters(), 1e-3), DataLoader(data, batch, True), 0, 0.0
    while True:
        for inputs, labels in loader:
            if done == WARM:
                begin = time.perf_counter()
            if done == WARM + steps:
                return time.perf_counter() - begin
            optimizer.zero_grad()
            loss = cross_entropy(module(inputs), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            loss.item()
            done += 1


def tables(batch: int, steps: int, directory: str) -> dict[str, Any]:
    """The job of both loops of hpctrain's."""
    return {
        "job": {"name": "small", "steps": WARM + steps, "output_dir": directory}, "dataset": {"name": "small_steps:samples"},
        "optimizer": {"name": "adamw", "lr": 1e-3, "clip_norm": 1.0}, "batch": {"global_size": batch, "micro_size": batch},
        "precision": {"mode": "fp32"}, "checkpoint": {"every_steps": 10**6},
    }  # fmt: skip


def run(batch: int, steps: int) -> float:
    """Seconds of the steps of `hpctrain run`, by the rows of its metrics."""
    with tempfile.TemporaryDirectory() as directory:
        model = {"name": "small_steps:network", "loss": "torch.nn.functional:cross_entropy"}
        times = [row["time"] for row in rows_of({**tables(batch, steps, directory), "model": model}, directory)]
    return float(times[-1] - times[WARM - 1])


def rows_of(job: dict[str, Any], directory: str) -> list[dict[str, Any]]:
    """The rows of the steps of a run."""
    hpctrain.run(job)
    lines = Path(directory, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def own(batch: int, steps: int) -> float:
    """Seconds of the steps of an own loop."""
    begin = 0.0
    with tempfile.TemporaryDirectory() as directory, hpctrain.own_loop(tables(batch, steps, directory)) as loop:
        module = network()
        module, optimizer = loop.setup(module, torch.optim.AdamW(module.parameters(), 1e-3))
        for step in loop.steps():
            if step.number == WARM + 1:
                begin = time.perf_counter()
            for inputs, labels in step:
                loop.backward(cross_entropy(module(inputs), labels))
            optimizer.step()
        return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for batch, steps in ((32, 1000), (1024, 200)):
        best: dict[str, float] = {}
        for _ in range(rounds):
            for name, measure in (("plain", plain), ("run", run), ("own loop", own)):
                with contextlib.redirect_stdout(io.StringIO()):
                    taken = 1e3 * measure(batch, steps) / steps
                best[name] = min(taken, best.get(name, taken))
        shown = ", ".join(f"{name} {value:.2f} ms ({value / best['plain']:.2f})" for name, value in best.items())
        print(f"batch {batch}: {shown}", flush=True)


if __name__ == "__main__":
    main()
