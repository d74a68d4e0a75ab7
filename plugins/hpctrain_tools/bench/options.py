"""Arguments of the commands that measure a job, and how their ranks start. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from hpctrain.base.launcher_variables import launched
from hpctrain.base.safe_files import scratch_directory
from hpctrain.toolkit.commands import set_option
from hpctrain_tools.bench import start_measuring
from hpctrain_tools.bench.tables import SCRATCH

# ranks
_DEFAULT = 2


def job_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """JOB.toml, --steps, --set and --json."""
    for decorate in (
        click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table."),
        set_option,
        click.option("--steps", default=20, show_default=True, type=click.IntRange(min=1), help="Steps to measure, after warm-up."),
        click.argument("job", metavar="JOB.toml", type=click.Path(path_type=Path)),
    ):  # fmt: skip
        function = decorate(function)
    return function


ranks_option = click.option(
    "-n", "ranks", type=click.IntRange(min=1), metavar="RANKS", help=f"Number of ranks (default: {_DEFAULT}, or the launcher's)."
)  # fmt: skip


def words_of(job: Path, steps: int, overrides: Sequence[str]) -> list[str]:
    """The command line of a measurement, for the ranks."""
    return [str(job), "--steps", str(steps), *(word for one in overrides for word in ("--set", one))]


def started(
    name: str, job: Path, ranks: int | None, steps: int, overrides: Sequence[str], more: Sequence[str], as_json: bool
) -> int | None:
    """Check the job, and run `hpctrain bench NAME` again on ranks of its own; the exit code. None on ranks of a launcher."""
    if launched():
        return None
    from hpctrain.job.reading import read_job
    from hpctrain_tools.bench.running import refuse

    count = ranks or _DEFAULT
    refuse(read_job(job, overrides), count, steps)
    with scratch_directory("bench-") as directory:
        os.environ[SCRATCH] = str(directory)  # ranks that fail end at once, and remove nothing
        return start_measuring(count, [name, *words_of(job, steps, overrides), *more], as_json)
