"""hpctrain cancel: ends a submitted run."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.base.errors import HpctrainError
from hpctrain.cli.options import example, say
from hpctrain.toolkit.commands import hookimpl
from hpctrain_tools.options import load_option


@click.command("cancel", epilog=example("hpctrain cancel runs/gpt"))
@click.argument("directory", metavar="RUN_DIR", type=click.Path(path_type=Path))
@load_option
def command(directory: Path, load: tuple[str, ...]) -> None:
    """End the job of RUN_DIR, or all jobs of an array. The ranks finish their step and save; submit again to continue."""
    from hpctrain_tools.submit.asking import submitted

    failed: HpctrainError | None = None
    for one in submitted(directory, load):
        try:
            state = one.state()
            if state.is_live:
                one.cancel()
        except HpctrainError as error:  # the others of an array must still end
            if failed is not None:
                say(f"hpctrain: {failed}", err=True)
            failed = error
            continue
        said = "told to end" if state.is_live else f"{state.word} already, nothing to cancel"
        say(f"{one.directory}: {one}: {said}")
    if failed is not None:
        raise failed


@hookimpl
def hpctrain_command() -> click.Command:
    return command
