"""The measurement of a job on several numbers of ranks, one after the other. Imports no torch."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from hpctrain.base.child_python import python_module
from hpctrain.toolkit.commands import EXIT_TRAINING, UsageError

# seconds of a measurement, which has a limit of its own
_LIMIT = 1000.0
# characters of a bar
_WIDTH = 40


@dataclass(frozen=True)
class Place:
    """A measurement on a number of ranks. ideal: the seconds that perfect scaling from the first number gives; efficiency: ideal to
    measured; ratio: to a plain loop on each rank, in the same run."""

    ranks: int
    batch: int
    seconds: float
    low: float
    high: float
    ideal: float
    efficiency: float
    reference: Mapping[str, float] | None
    ratio: Mapping[str, float] | None


def numbers(text: str) -> list[int]:
    """Numbers of ranks, ascending. Raises UsageError."""
    try:
        found = sorted({int(one) for one in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise UsageError(f"-n {text}: expected numbers of ranks with commas, such as 1,2,4")
    return found


def batches(tables: Mapping[str, Any], counts: Sequence[int], weak: bool) -> list[tuple[str, int]]:
    """The key of the global batch and its size on each number of ranks; with `weak` it grows from the first one on."""
    table = tables.get("batch", {})
    key = "tokens" if "tokens" in table else "global_size"
    size = table.get(key)
    if not isinstance(size, int):
        raise UsageError(f"[batch] {key}: found {size!r}, expected the size of a global batch")
    uneven = [count for count in counts if weak and size * count % counts[0]]
    if uneven:
        raise UsageError(
            f"-n {uneven[0]}: with --weak [batch] {key} = {size} on {counts[0]} ranks grows to {size * uneven[0] / counts[0]:g}, "
            "expected a whole number: choose numbers of ranks that are multiples of the first"
        )
    return [(key, size * count // counts[0] if weak else size) for count in counts]


def measure(words: Sequence[str], ranks: int, batch: tuple[str, int]) -> dict[str, Any]:
    """Run `hpctrain bench step --json` on so many ranks; its object. Raises SystemExit with its exit code if it fails."""
    command = python_module("hpctrain", "bench", "step", *words, "-n", str(ranks), "--json")
    command += ["--set", f"batch.{batch[0]}={batch[1]}"]
    begin = time.monotonic()
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"-n {ranks}: not measured within {time.monotonic() - begin:.0f} s; take fewer --steps"
        ) from None
    if done.returncode:
        raise SystemExit(done.returncode)
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        print(f"hpctrain: -n {ranks}: bench step printed no JSON: {done.stdout[:200]!r}", file=sys.stderr)
        raise SystemExit(EXIT_TRAINING) from None
    return found


def places(found: Sequence[Mapping[str, Any]], sizes: Sequence[int], weak: bool) -> list[Place]:
    """The places of measurements; the first one is what the others are compared with."""
    first = found[0]
    made = []
    for one, size in zip(found, sizes, strict=True):
        ideal = first["seconds"] * (1.0 if weak else first["ranks"] / one["ranks"])
        figures = {key: one[key] for key in ("ranks", "seconds", "low", "high", "reference", "ratio")}
        made.append(Place(**figures, batch=size, ideal=ideal, efficiency=ideal / one["seconds"]))
    return made


def as_dict(job: str, weak: bool, steps: int, found: Sequence[Place]) -> dict[str, Any]:
    """JSON."""
    return {"job": job, "scaling": _name(weak), "steps": steps, "places": [asdict(one) for one in found]}


def lines(job: str, weak: bool, steps: int, found: Sequence[Place]) -> list[str]:
    """A table with bars of the efficiency."""
    told = [f"{job}, {_name(weak)} scaling, {steps} steps: median, ± half the interquartile range"]
    told.append("ranks   batch      step ms        ±     ideal  efficiency")
    for one in found:
        bar = "#" * min(_WIDTH, round(one.efficiency * _WIDTH))
        figures = f"{one.seconds * 1e3:12,.2f} {(one.high - one.low) * 500:8,.2f} {one.ideal * 1e3:9,.2f}"
        told.append(f"{one.ranks:5} {one.batch:7} {figures}    {one.efficiency:7.1%} {bar}")
    ratios = ", ".join(f"x{one.ratio['ratio']:.3f} on {one.ranks}" for one in found if one.ratio is not None)
    return [*told, *([f"to a plain loop on each rank, in the same run: {ratios}"] if ratios else [])]


def draw(job: str, weak: bool, found: Sequence[Place], path: Path) -> None:
    """Write a picture of the efficiency, as its name's ending says. Raises ImportError, OSError and ValueError."""
    figure = import_module("matplotlib.figure").Figure(figsize=(5, 3), layout="constrained")
    axes = figure.add_subplot()
    ranks = [one.ranks for one in found]
    below = [one.efficiency - one.ideal / one.high for one in found]
    above = [one.ideal / one.low - one.efficiency for one in found]
    axes.errorbar(ranks, [one.efficiency for one in found], yerr=[below, above], marker="o", capsize=3)
    axes.axhline(1.0, linestyle=":", color="grey")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(one) for one in ranks])
    axes.set_ylim(0, max(1.1, *(one.ideal / one.low for one in found)))
    axes.set_xlabel("ranks")
    axes.set_ylabel(f"{_name(weak)} efficiency")
    axes.set_title(job)
    figure.savefig(path)


def _name(weak: bool) -> str:
    return "weak" if weak else "strong"
