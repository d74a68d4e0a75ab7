"""hpctrain bench peers: measures other trainers on a job's model, samples and optimizer."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hpctrain.toolkit.commands import example, hookimpl, say
from hpctrain_tools.bench.options import job_arguments, ranks_option, started

# the exit code for other losses, as for `checkpoint diff`
_DIFFERENT = 1


@click.command("peers", epilog=example("hpctrain bench peers job.toml -n 4 --only ddp,fsdp2"))
@job_arguments
@ranks_option
@click.option(
    "--only", metavar="NAME,...", help="These trainers: ddp, fsdp2, accelerate, lightning, deepspeed (default: all)."
)
def command(
    job: Path, ranks: int | None, steps: int, overrides: tuple[str, ...], as_json: bool, only: str | None
) -> int:  # fmt: skip
    """Measure other trainers beside hpctrain on the model, samples and optimizer of JOB.toml.

    They are torch's DDP and FSDP2, and Accelerate, Lightning and DeepSpeed where they are installed. All take turns in the same
    processes. Exit code 1 if one has other losses than hpctrain.

    Under mpiexec or srun every process is a rank; otherwise the command starts its own ranks.
    """
    from hpctrain_tools.bench.peers import Peers, chosen

    peers = Peers(chosen(only))
    code = started("peers", job, ranks, steps, overrides, ("--only", only) if only else (), as_json)
    if code is not None:
        return code
    from hpctrain_tools.bench.running import measure

    turns = measure(job, overrides, ranks, steps, peers.choose)
    result = peers.result(turns)
    if turns.rank == 0:
        say(json.dumps(result.as_dict()) if as_json else "\n".join(result.lines()))
    return _DIFFERENT if result.different else 0


@hookimpl
def hpctrain_command() -> click.Command:
    return command
