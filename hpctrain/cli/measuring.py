"""Parts that benchmarks share: ranks of their own, and rows of results."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import click

from hpctrain.base.errors import UsageError

_TIME_LIMIT = 900


def start_measuring(ranks: int, words: list[str], as_json: bool) -> int:
    """Run `hpctrain bench WORDS` again, on ranks of its own; the exit code. Raises UsageError without an MPI."""
    from hpctrain.starting.processes import launch_over_mpi

    command = [sys.executable, "-m", "hpctrain", "bench", *words, *(["--json"] if as_json else [])]
    launched = launch_over_mpi(command, ranks)
    if launched is None:
        raise UsageError(f"hpctrain bench {words[0]} needs an MPI to start its ranks: pip install 'hpctrain[mpich]'")
    try:
        return launched.wait(_TIME_LIMIT)
    finally:
        launched.kill()


def tell_measured(rows: Sequence[Any], lines: Iterable[str], as_json: bool) -> None:
    """Print rows (dataclasses) as JSON, or as `lines`."""
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    for line in lines:
        click.echo(line)
