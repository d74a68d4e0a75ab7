"""hpctrain status: where a run is."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.base.errors import UsageError
from hpctrain.cli.options import example, say
from hpctrain.toolkit.commands import hookimpl
from hpctrain_tools.options import load_option


@click.command("status", epilog=example("hpctrain status runs/gpt"))
@click.argument("directory", metavar="RUN_DIR", type=click.Path(path_type=Path))
@load_option
def command(directory: Path, load: tuple[str, ...]) -> None:
    """Say whether the run in RUN_DIR is running, done, stopped or failed, its last step and its newest checkpoint.

    Of a run that `hpctrain submit` submitted, say what the scheduler says: pending, running, done, failed or cancelled. For the
    directory of an array there is a line for each run.
    """
    from hpctrain_tools.runs.run_directory import RunDirectory
    from hpctrain_tools.runs.standing import described
    from hpctrain_tools.submit.asking import submitted
    from hpctrain_tools.submit.record import newest

    if newest(directory) is None:
        told = described(directory)
        if told is None:
            what = "no run in it" if directory.is_dir() else "no directory"
            raise UsageError(f"{directory}: found {what}, expected the directory of a run, such as runs/NAME")
        say(f"{directory}: {told}")
        return
    for one in submitted(directory, load):
        state, run = one.state(), RunDirectory(one.directory)
        progress = run.job().progress(run.newest_rows().step)
        words = " ".join(word for word in (state.word, state.detail) if word)
        say(f"{one.directory}: {one}: {words}" + (f", {progress}" if progress else ""))


@hookimpl
def hpctrain_command() -> click.Command:
    return command
