"""`python tests/faults/kills.py --rounds 30`: kills each rank in turn at random times and says what became of the job.

A job on 3 ranks with --restarts saves every second step. A round is lost if the job does not end with 0, or its losses are
not those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import tomli_w

sys.path.insert(0, str(Path(__file__).parent.parent))
from launching import Started, hpctrain, run, started

RANKS, STEPS = 3, 40
SLOW = """
import time

from hpctrain.api import hookimpl


@hookimpl
def hpctrain_step_end(step):
    time.sleep(0.05)
"""


def losses(directory: Path) -> list[float]:
    whole = [
        line for line in (directory / "metrics.jsonl").read_text().splitlines(keepends=True) if line.endswith("\n")
    ]
    rows = [json.loads(line) for line in whole]
    return [row["loss"] for row in rows if "loss" in row]


def kill_one(job: Started, rank: int, patience: float) -> str:
    """Kill the rank after a random time; whether it still ran."""
    time.sleep(patience)
    ranks = sorted(job.ranks(), key=lambda process: process.pid)
    if len(ranks) <= rank:
        return "was not there"
    ranks[rank].kill()
    return "killed"


def round_of(number: int, directory: Path, whole: list[float]) -> bool:
    """One round; whether nothing was lost."""
    output = f"out-{number}"
    options = (
        "--restarts",
        "3",
        "--set",
        f"job.output_dir={output}",
        "--set",
        f"communicator.name={('mpi', 'gloo')[number % 2]}",
    )
    patience = random.uniform(0.5, 9.0)
    with started(
        hpctrain("run", "job.toml", "-n", str(RANKS), *options), directory, {"PYTHONPATH": str(directory)}
    ) as job:
        what = kill_one(job, number % RANKS, patience)
        done = job.finish(150)
    restarts = done.err.count("hpctrain: restart ")
    same = done.code == 0 and len(losses(directory / output)) == STEPS
    same = same and all(abs(a - b) <= 2e-6 * abs(b) for a, b in zip(losses(directory / output), whole, strict=True))
    fate = "recovered" if same else "LOST"
    print(
        f"round {number:3}: rank {number % RANKS} {what} after {patience:4.1f} s, {restarts} restarts, exit {done.code}: {fate}",
        flush=True,
    )
    if not same:
        print(done, flush=True)
    return same


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "slow.py").write_text(SLOW)
        tables = {
            "job": {"name": "killed", "steps": STEPS},
            "model": {
                "name": "gpt",
                "hidden_size": 16,
                "layers": 2,
                "attention_heads": 2,
                "vocab_size": 64,
                "max_seq_length": 8,
            },
            "dataset": {"name": "synthetic", "samples": 500},
            "optimizer": {"name": "adamw", "lr": 0.01},
            "batch": {"global_size": 12, "micro_size": 1},
            "checkpoint": {"every_steps": 2, "keep": 2},
            "plugins": {"load": ["slow"]},
        }
        (directory / "job.toml").write_text(tomli_w.dumps(tables))
        words = hpctrain("run", "job.toml", "--set", "job.output_dir=whole")
        assert run(words, directory, 120, {"PYTHONPATH": name}).code == 0
        whole = losses(directory / "whole")
        kept = sum(round_of(number, directory, whole) for number in range(rounds))
    print(f"{rounds} rounds: {kept} recovered, {rounds - kept} lost")
    sys.exit(kept != rounds)


if __name__ == "__main__":
    main()
