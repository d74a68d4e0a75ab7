"""hpctrain check: checks a job without training it."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.options import example, job_arguments, say
from hpctrain.job.environment import cached_on_node
from hpctrain.toolkit.commands import hookimpl
from hpctrain_tools.options import size_text


@click.command("check", epilog=example("hpctrain check job.toml -n 4"))
@job_arguments
@cached_on_node()
def command(job: Path, ranks: int | None, overrides: tuple[str, ...]) -> None:
    """Check JOB.toml without training: keys, types, plugins, model, data, and with -n the layout and the batch.

    If only this machine lacks something, such as a GPU for fp8, that is a note: the job may be meant for another machine.
    """
    from hpctrain.job.reading import read_job
    from hpctrain_tools.full_check import check_thoroughly, notes, sizes

    checked, data = check_thoroughly(read_job(job, overrides), ranks)
    for note in [*checked.registry.notes(), *notes(checked.job, checked.parts, checked.registry, ranks)]:
        say(f"{job}: note: {note}", err=True)
    about = "about " if data.training.is_estimate else ""
    told = f"{about}{data.samples:,} training samples" if data.samples is not None else "a stream of training samples"
    steps = f"{about if checked.job.job.epochs else ''}{data.steps} steps"
    say(f"{job}: ok, {steps}, {told}" + (f", on {ranks} ranks" if ranks else ""))
    parameters, nbytes = sizes(checked)
    needs = "parameters, gradients and optimizer state, and more for activations"
    told = "" if nbytes is None else f"; a rank needs about {size_text(nbytes)} for {needs}"
    say(f"{job}: {parameters}{told}")


@hookimpl
def hpctrain_command() -> click.Command:
    return command
