"""Parts that benchmarks share: their ranks, and what they print."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from hpctrain.base.child_python import python_module
from hpctrain.toolkit.commands import UsageError, say
from hpctrain_tools.launch.processes import launch_over_mpi, spawn_with_parent

_TIME_LIMIT = 900


def start_measuring(ranks: int, words: list[str], as_json: bool) -> int:
    """Run `hpctrain bench WORDS` again, on ranks of its own; the exit code. Raises UsageError without an MPI, and if it takes
    too long."""
    command = python_module("hpctrain", "bench", *words, *(["--json"] if as_json else []))
    launched = launch_over_mpi(command, ranks, spawn_with_parent)
    if launched is None:
        raise UsageError(f"hpctrain bench {words[0]} needs an MPI to start its ranks: pip install 'hpctrain[mpich]'")
    try:
        return launched.wait(_TIME_LIMIT)
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"hpctrain bench {words[0]} took more than {_TIME_LIMIT:g} s on {ranks} rank{'s' * (ranks > 1)} and was ended; "
            "measure less, such as fewer --steps of a job"
        ) from None
    finally:
        launched.kill()


def tell_measured(rows: Sequence[Any], lines: Iterable[str], as_json: bool) -> None:
    """Print rows (dataclasses) as JSON, or as `lines`."""
    if as_json:
        say(json.dumps([asdict(row) for row in rows], indent=2))
        return
    for line in lines:
        say(line)


class Spread(NamedTuple):
    """The median of measurements, and the quartiles below and above it."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)
