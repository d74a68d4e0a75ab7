"""hpctrain check: everything that can be said about a job without training it."""

from __future__ import annotations

import os
from pathlib import Path

import click

from hpctrain.cli.options import job_arguments


@click.command("check")
@job_arguments
def command(job: Path, ranks: int | None, overrides: tuple[str, ...]) -> None:
    """Check JOB.toml without training: keys, types, plugins, data, and with -n the layout and the batch."""
    from hpctrain.data.opening import open_data
    from hpctrain.job.check import check
    from hpctrain.job.problems import JobError, Problem
    from hpctrain.job.reading import read_job
    from hpctrain.job.resolved import FILE_NAME, refuse_other_job, resolved_tables

    checked = check(read_job(job, overrides), ranks)
    weights = checked.job.model.weights
    if weights is not None and not os.access(weights, os.R_OK):
        message = f"[model] weights: there are none at {weights}, or no permission to read them"
        raise JobError(checked.raw, [Problem(("model", "weights"), message)])
    data = open_data(checked.job, checked.parts)
    refuse_other_job(checked.job.output_dir / FILE_NAME, resolved_tables(checked))
    click.echo(
        f"{job}: ok, {data.steps} steps, {len(data.training):,} training samples"
        + (f", on {ranks} ranks" if ranks else "")
    )
