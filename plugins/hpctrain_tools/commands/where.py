"""hpctrain where: what a running job's ranks do, asked from another terminal."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.base.errors import UsageError
from hpctrain.cli.options import example, say
from hpctrain.toolkit.commands import hookimpl
from hpctrain_tools.runs.asking import ask


@click.command("where", epilog=example("hpctrain where runs/gpt"))
@click.argument("directory", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.option("--timeout", default=60.0, show_default=True, type=click.FloatRange(min=0, min_open=True), help="Seconds to wait for "
              "the job's answer.")  # fmt: skip
def command(directory: Path, timeout: float) -> None:
    """Print the step, the phase and the line at which each rank of the job in RUN_DIR stands, and what it waits for.

    Works on any machine that sees RUN_DIR, also while the job hangs.
    """
    if not directory.is_dir():
        raise UsageError(f"{directory} is no directory; expected the output_dir of a running job, such as runs/NAME")
    for line in ask(directory, timeout):
        say(line)


@hookimpl
def hpctrain_command() -> click.Command:
    return command
