"""Measures how good the first choice of `hpctrain plan --fit` is: the settings that it planned, trained in turns.

    python benchmarks/fitted.py JOB.toml -n 4 --steps 12 --rounds 3

The machine's figures are measured first (`hpctrain bench machine`). Of the settings that fit, and of some that were slower, the
median step of each round is taken; the ratio of the first choice to the fastest is printed. Give --memory to leave some out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_FIRST = 3
"""Steps that are left out."""


def hpctrain(*words: str) -> str:
    """Run a command; its output. Exit code 1 is an answer of `plan`."""
    done = subprocess.run([sys.executable, "-m", "hpctrain", *words], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)
    return done.stdout


def overrides(tables: Mapping[str, Any]) -> Iterator[str]:
    """--set for each key of the tables."""
    for name, table in tables.items():
        for key, value in table.items():
            yield from ("--set", f"{name}.{key}={json.dumps(value)}")


def median_step(job: Path, ranks: int, steps: int, settings: Mapping[str, Any]) -> float:
    """The median seconds of a step of a training with the settings."""
    with tempfile.TemporaryDirectory() as directory:
        sets = [*overrides(settings), "--set", f"job.steps={steps}", "--set", f'job.output_dir="{directory}/out"']
        hpctrain("run", str(job), "-n", str(ranks), *sets)
        lines = (Path(directory) / "out" / "metrics.jsonl").read_text().splitlines()
    seconds = [row["step_seconds"] for row in map(json.loads, lines) if "step_seconds" in row]
    return float(statistics.median(seconds[_FIRST:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("-n", dest="ranks", type=int, default=4)
    parser.add_argument("--memory")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=int, default=8, help="settings to measure")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        machine = str(Path(directory) / "machine.toml")
        print(hpctrain("bench", "machine", "-n", str(given.ranks), "--output", machine))
        words = ["plan", str(given.job), "-n", str(given.ranks), "--machine", machine, "--json"]
        words += ["--fit", str(Path(directory) / "fitted.toml"), *(["--memory", given.memory] if given.memory else [])]
        found = json.loads(hpctrain(*words))
    others = [one for one in found["others"] if one["fits"]]
    tried = sorted([*found["fitting"], *others], key=lambda one: one["step_seconds"])[: given.most]
    measured = [
        [median_step(given.job, given.ranks, given.steps, one["settings"]) for one in tried]
        for _ in range(given.rounds)
    ]
    medians = [statistics.median(of_one) for of_one in zip(*measured, strict=True)]
    for one, seconds in zip(tried, medians, strict=True):
        print(f"planned {one['step_seconds']:.4f} s, measured {seconds:.4f} s: {json.dumps(one['settings'])}")
    ratios = [round_[0] / min(round_) for round_ in measured]
    print(f"the first choice against the fastest of {len(tried)}: {medians[0] / min(medians):.3f}, in rounds {ratios}")


if __name__ == "__main__":
    main()
