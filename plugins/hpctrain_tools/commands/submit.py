"""hpctrain submit: sends a job to a scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hpctrain.cli.options import example, say, set_option
from hpctrain.toolkit.commands import hookimpl


@click.command("submit", epilog=example("hpctrain submit job.toml --to slurm --nodes 2 --ranks-per-node 4 --time 2h"))
@click.argument("job", metavar="JOB.toml", type=click.Path(path_type=Path))
@click.option("--to", metavar="TARGET", help="slurm, pbs, flux, kubernetes or another scheduler plugin (default: the only "
              "table of [scheduler]).")  # fmt: skip
@click.option("--nodes", type=click.IntRange(min=1), metavar="N", help="Nodes to ask for.")
@click.option("--ranks-per-node", type=click.IntRange(min=1), metavar="M", help="Ranks on each node.")
@click.option(
    "--time", metavar="TIME", help="Time limit of one start, such as 24h, or as in Slurm 90 (minutes) or 1-12:00:00."
)
@set_option
@click.option("--array", metavar="KEY=V1,V2,...", help="Submit one run for each value, in a directory of its own.")
@click.option("--after", metavar="RUN_DIR|ID", help="Start when this run, or this job of the scheduler, is done.")
@click.option("--dry-run", is_flag=True, help="Print the script; write and submit nothing.")
def command(
    job: Path, to: str | None, overrides: tuple[str, ...], array: str | None, after: str | None, dry_run: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Check JOB.toml, write a batch script into the run's directory, and submit it.

    The options of a target are in the job's table [scheduler.TARGET]; --nodes, --ranks-per-node and --time stand for keys of it.
    """
    from hpctrain_tools.submit.prepare import SubmitOptions, prepare
    from hpctrain_tools.submit.submit import scripts, submit

    given = {key: value for key, value in options.items() if value is not None}
    prepared = prepare(SubmitOptions(job, overrides, to, given, array))
    if dry_run:
        for script in scripts(prepared, after):
            say(script, nl=False)
        return
    ids = submit(prepared, after)
    say(f"submitted    {prepared.target} job {' '.join(ids)}, in {prepared.directory}")


@hookimpl
def hpctrain_command() -> click.Command:
    return command
