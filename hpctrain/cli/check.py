"""hpctrain check: everything that can be said about a job without training it."""

from __future__ import annotations

import os
from pathlib import Path

import click

from hpctrain.cli.options import job_arguments
from hpctrain.errors import EXIT_CHECKPOINT, HpctrainError, reason


@click.command("check")
@job_arguments
def command(job: Path, ranks: int | None, overrides: tuple[str, ...]) -> None:
    """Check JOB.toml without training: keys, types, plugins, model, data, and with -n the layout and the batch.

    What only this machine lacks, such as a GPU for fp8, is a note: the job may be meant for another one.
    """
    from hpctrain.checking.check import check
    from hpctrain.checking.resolved import FILE_NAME, refuse_other_job, resolved_tables
    from hpctrain.checking.trial import notes
    from hpctrain.checkpoint.weights import open_weights
    from hpctrain.data.opening import open_data
    from hpctrain.job.problems import JobError, PlacedProblem
    from hpctrain.job.reading import read_job

    checked = check(read_job(job, overrides), ranks, tries=True)
    weights = checked.job.model.weights
    if weights is not None and not os.access(weights, os.R_OK):
        message = f"[model] weights: there are none at {weights}, or no permission to read them"
        raise JobError(checked.raw, [PlacedProblem(("model", "weights"), message)])
    if weights is not None:
        try:
            open_weights(weights, checked.parts.formats)  # their table only
        except (HpctrainError, OSError) as error:
            code = error.exit_code if isinstance(error, HpctrainError) else EXIT_CHECKPOINT
            raise JobError(
                checked.raw, [PlacedProblem(("model", "weights"), f"[model] weights: {reason(error)}", code)]
            ) from None
    data = open_data(checked.job, checked.parts)
    refuse_other_job(checked.job.output_dir / FILE_NAME, resolved_tables(checked))
    for note in notes(checked.job, checked.parts, checked.plan, checked.registry, ranks):
        click.echo(f"{job}: note: {note}", err=True)
    click.echo(
        f"{job}: ok, {data.steps} steps, {len(data.training):,} training samples"
        + (f", on {ranks} ranks" if ranks else "")
    )
