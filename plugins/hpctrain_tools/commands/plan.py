"""hpctrain plan: what a job will need, before it waits in a queue."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.options import example, job_arguments, say
from hpctrain.job.environment import cached_on_node
from hpctrain.toolkit.commands import hookimpl

if TYPE_CHECKING:
    from hpctrain_tools.plan.plan import Hardware


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
        "hpctrain plan job.toml -n 8 --machine a100 --fit fitted.toml",
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
@click.option(
    "--fit",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Search layouts, sharding, activation checkpointing and micro batches that fit into the memory of the machine's devices, "
    "list the fastest, and write the first one to FILE, a job file that extends JOB.toml.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: bytes, seconds, floating-point operations.")
@cached_on_node()
def command(
    job: Path,
    ranks: int | None,
    overrides: tuple[str, ...],
    memory: float | None,
    machine: str | None,
    per_node: int | None,
    fit: Path | None,
    as_json: bool,
) -> None:
    """Plan JOB.toml on RANKS ranks: memory, communication and computing of a step, without a GPU and without training.

    A step runs with the job's own plugins on tensors that have shapes and no values. Exit code 1 if the memory of a device is
    known and too small, or if nothing fits.
    """
    from hpctrain.job.reading import read_job
    from hpctrain_tools.plan.machines import open_machine
    from hpctrain_tools.plan.plan import Hardware, make_plan

    hardware = Hardware.of(ranks or 1, per_node, memory, None if machine is None else open_machine(machine))
    if fit is not None:
        _fit(job, overrides, hardware, fit, as_json)
        return
    found = make_plan(read_job(job, overrides), hardware)
    if as_json:
        say(json.dumps(found.as_dict()))
    else:
        for line in found.lines():
            say(line)
    if found.fits is False:
        raise SystemExit(1)


def _fit(job: Path, overrides: tuple[str, ...], hardware: Hardware, path: Path, as_json: bool) -> None:
    from hpctrain.base.errors import UsageError, reason
    from hpctrain.job.reading import read_job
    from hpctrain_tools.plan.fit import remedies, search, shortlist
    from hpctrain_tools.plan.fitted import Progress, as_dict, fitted_text, table

    if hardware.machine is None:
        raise UsageError(
            "--fit: found no --machine, whose figures tell which settings are the fastest; give one, such as h100"
        )
    if path.exists() or not path.parent.is_dir():
        found = "a file that exists" if path.exists() else f"no directory {path.parent}"
        raise UsageError(f"--fit {path}: found {found}, expected the name of a new file")
    raw = read_job(job, overrides)
    progress = Progress(sys.stderr)
    trials = search(raw, hardware, progress.tell)
    progress.end()
    fitting = shortlist(trials)
    advice = [] if fitting else list(remedies(raw, hardware, trials))
    if as_json:
        say(json.dumps(as_dict(trials, fitting, advice)))
    else:
        for line in (*table(trials, fitting, hardware.ranks), *advice):
            say(line)
    if not fitting:
        raise SystemExit(1)
    try:
        path.write_text(fitted_text(fitting[0], raw, job, overrides, path))
    except OSError as error:
        raise UsageError(f"--fit {path} cannot be written: {reason(error)}") from None
    say(f"{path} has the first one: hpctrain run {path} -n {hardware.ranks}", err=True)


@hookimpl
def hpctrain_command() -> click.Command:
    return command
