"""hpctrain runs: the runs below a directory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from hpctrain.base.errors import UsageError
from hpctrain.cli.options import example, say
from hpctrain.toolkit.commands import hookimpl
from hpctrain_tools.options import load_option


@click.command("runs", epilog=example("hpctrain runs", "hpctrain runs runs/sweep --json"))
@click.argument("directory", metavar="[DIR]", default="runs", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list with an object for each run.")
@load_option
def command(directory: Path, as_json: bool, load: tuple[str, ...]) -> None:
    """List the runs in DIR and below (default: runs), the newest first.

    Each with its state, step, newest loss and evaluation, when it last wrote, its job and its newest checkpoint. A narrow terminal
    shows the first of these columns, a pipe all.
    """
    if not directory.is_dir():
        raise UsageError(f"{directory}: found no directory, expected one with the directories of runs, such as runs")
    from rich.console import Console

    from hpctrain_tools.runs.listing import list_runs
    from hpctrain_tools.runs.table import table

    listing = list_runs(directory, load)
    for remark in listing.remarks:
        say(f"hpctrain: note: {remark}", err=True)
    if as_json:
        say(json.dumps([one.as_json() for one in listing.runs], indent=1))
    elif not listing.runs:
        say(f"{directory}: no run in it or below", err=True)
    else:
        console = Console(highlight=False)
        for line in table(listing.runs, console.width if sys.stdout.isatty() else None):
            if sys.stdout.isatty():
                console.print(line, soft_wrap=True)
            else:
                say(line.plain)


@hookimpl
def hpctrain_command() -> click.Command:
    return command
