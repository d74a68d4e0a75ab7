"""hpctrain bench step: measures a job's step, its parts, and the same step of a plain PyTorch loop."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hpctrain.toolkit.commands import example, hookimpl, say
from hpctrain_tools.bench.options import job_arguments, ranks_option, started


@click.command("step", epilog=example("hpctrain bench step job.toml -n 4 --set batch.micro_size=8"))
@job_arguments
@ranks_option
def command(job: Path, ranks: int | None, steps: int, overrides: tuple[str, ...], as_json: bool) -> int:
    """Measure a step of JOB.toml and its parts, beside a plain PyTorch loop on each rank.

    Nothing is saved. The loop has the same model, samples and optimizer, and no communication.

    Under mpiexec or srun every process is a rank; otherwise the command starts its own ranks.
    """
    code = started("step", job, ranks, steps, overrides, (), as_json)
    if code is not None:
        return code
    from hpctrain_tools.bench.running import measure
    from hpctrain_tools.bench.step import measured_step, plain_loop

    turns = measure(job, overrides, ranks, steps, plain_loop)
    if turns.rank == 0:
        result = measured_step(turns)
        say(json.dumps(result.as_dict()) if as_json else "\n".join(result.lines()))
    return 0


@hookimpl
def hpctrain_command() -> click.Command:
    return command
