"""Arguments that several subcommands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def job_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """JOB.toml, -n and --set."""
    for decorate in (
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="TABLE.KEY=VALUE",
            help="Override a key, or with TABLE.KEY= take it away; may be repeated.",
        ),
        click.option("-n", "ranks", type=click.IntRange(min=1), metavar="RANKS", help="Number of ranks."),
        click.argument("job", metavar="JOB.toml", type=click.Path(path_type=Path)),
    ):
        function = decorate(function)
    return function
