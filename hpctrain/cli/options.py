"""Options and lines that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hpctrain.base.errors import escaped


def say(text: object, err: bool = False, nl: bool = True) -> None:
    """Print a line of a command. Control characters are escaped: a file of somebody else must not steer the terminal."""
    click.echo(escaped(str(text)), err=err, nl=nl)


def example(*lines: str) -> str:
    """The end of a command's help, with command lines that click does not wrap, for `epilog`."""
    return "\b\n" + "\n".join(["Example:", *(f"  {line}" for line in lines)])


set_option = click.option(
    "--set", "overrides", multiple=True, metavar="TABLE.KEY=VALUE",
    help="Override a key, or remove it with TABLE.KEY=; may be repeated.",
)  # fmt: skip


def job_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """JOB.toml, -n and --set."""
    for decorate in (
        set_option,
        click.option("-n", "ranks", type=click.IntRange(min=1), metavar="RANKS", help="Number of ranks."),
        click.argument("job", metavar="JOB.toml", type=click.Path(path_type=Path)),
    ):
        function = decorate(function)
    return function
