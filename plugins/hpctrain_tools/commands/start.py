"""hpctrain start: starts the ranks of another command; `hpctrain run -n 4` hands its words over to it."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.options import job_arguments
from hpctrain.toolkit.commands import hookimpl


@click.command("start", hidden=True)
@click.argument("name", metavar="COMMAND")
@job_arguments
@click.option("--restarts", default=0, type=click.IntRange(min=0), metavar="N", help="As of `hpctrain run`.")
@click.option("--hostfile", type=click.Path(path_type=Path), metavar="FILE", help="As of `hpctrain run`.")
@click.argument("words", nargs=-1)
def command(
    name: str, job: Path, ranks: int | None, overrides: tuple[str, ...], restarts: int, hostfile: Path | None,
    words: tuple[str, ...],
) -> int:  # fmt: skip
    """Start `hpctrain COMMAND JOB.toml WORDS...` on RANKS ranks, here or on the hosts of a file."""
    from hpctrain_tools.launch.start import start_ranks

    return start_ranks(name, job, ranks, overrides, words, restarts, hostfile)


@hookimpl
def hpctrain_command() -> click.Command:
    """The command."""
    return command
