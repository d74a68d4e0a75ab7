"""hpctrain top: runs, live."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from hpctrain.cli.options import example
from hpctrain.toolkit.commands import hookimpl


@click.command("top", epilog=example("hpctrain top runs/gpt", "hpctrain top runs/gpt --once"))
@click.argument("directories", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Print a single frame and end, as where the output is no terminal.")
def command(directories: tuple[Path, ...], once: bool) -> None:
    """Show the run in each RUN_DIR live: state, progress, losses, speed, memory, the end of its log.

    Reads the run's files only, so it works on any machine that sees RUN_DIR, also before and after the run. q or Ctrl-C ends the
    view. A small terminal shows the most important lines.
    """
    from hpctrain_tools.runs.top import show, show_once, watched

    runs = watched(directories)
    if once or not sys.stdout.isatty() or os.environ.get("TERM", "dumb") in ("dumb", ""):
        show_once(runs)
    else:
        show(runs)


@hookimpl
def hpctrain_command() -> click.Command:
    return command
