"""hpctrain status: where a submitted run is."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.options import load_option
from hpctrain.errors import escaped


@click.command("status")
@click.argument("directory", metavar="RUN_DIR", type=click.Path(path_type=Path))
@load_option
def command(directory: Path, load: tuple[str, ...]) -> None:
    """Say whether the job of RUN_DIR is pending, running, done, failed or cancelled, and its last step.

    For the directory of an array there is a line for each run.
    """
    from hpctrain.submission.asking import submitted

    for one in submitted(directory, load):
        state, progress = one.state(), one.progress()
        words = " ".join(word for word in (state.word, state.detail) if word)
        click.echo(escaped(f"{one.directory}: {one}: {words}" + (f", {progress}" if progress else "")))
