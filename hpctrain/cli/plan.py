"""hpctrain plan: what a job will need, before it waits in a queue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from hpctrain.cli.options import example, job_arguments


class Size(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Bytes, such as 80GB (of 10^9 bytes) or 40GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from hpctrain.contracts.plugin import parse_bytes

        try:
            found = parse_bytes(str(value))
        except ValueError:
            self.fail(f"found {value!r}, expected bytes such as 80GB or 40GiB", param, ctx)
        assert isinstance(found, int)
        return float(found)


@click.command(
    "plan",
    epilog=example(
        "hpctrain plan job.toml -n 64 --machine h100",
        "hpctrain plan job.toml -n 8 --memory 40GB --set sharding.stage=3",
    ),
)
@job_arguments
@click.option("--memory", type=Size(), help="Memory of a device, such as 80GB; by default the machine's.")
@click.option(
    "--machine",
    metavar="NAME",
    help="Estimate the time of a step on this machine: v100, a100, h100, h200, b200, mi250x, mi300x, pvc, or a TOML file with a "
    "table [machine].",
)
@click.option(
    "--per-node",
    type=click.IntRange(min=1),
    metavar="RANKS",
    help="Ranks of a node; by default the machine's devices, or 8.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: bytes, seconds, floating-point operations.")
def command(
    job: Path,
    ranks: int | None,
    overrides: tuple[str, ...],
    memory: float | None,
    machine: str | None,
    per_node: int | None,
    as_json: bool,
) -> None:
    """Plan JOB.toml on RANKS ranks: memory, communication and computing of a step, without a GPU and without training.

    A step runs with the job's own plugins on tensors that have shapes and no values. Exit code 1 if the memory of a device is
    known and too small.
    """
    from hpctrain.job.reading import read_job
    from hpctrain.planning.machines import open_machine
    from hpctrain.planning.plan import make_plan

    found = make_plan(
        read_job(job, overrides), ranks or 1, per_node, None if machine is None else open_machine(machine), memory
    )
    if as_json:
        click.echo(json.dumps(found.as_dict()))
    else:
        for line in found.lines():
            click.echo(line)
    if found.fits is False:
        raise SystemExit(1)
