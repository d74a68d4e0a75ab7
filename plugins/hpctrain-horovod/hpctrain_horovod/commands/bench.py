"""hpctrain bench horovod: measures Horovod's operations and a training step."""

from __future__ import annotations

import sys

import click
from hpctrain_tools.bench import start_measuring, tell_measured

from hpctrain.base.launcher_variables import launched
from hpctrain.toolkit.commands import example, hookimpl


@click.command("horovod", epilog=example("hpctrain bench horovod -n 2"))
@click.option("-n", "ranks", type=click.IntRange(min=1), default=2, show_default=True, help="Number of ranks.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array instead of a table.")
def command(ranks: int, as_json: bool) -> None:
    """Measure Horovod's operations and a training step against torch.distributed, MPI, and a real Horovod if one is installed.

    Under mpiexec or srun every process is a rank; otherwise the command starts its own ranks.
    """
    if not launched():
        sys.exit(start_measuring(ranks, ["horovod"], as_json))
    import torch

    from hpctrain.mpi import MPI
    from hpctrain_horovod.benchmark import measure

    torch.set_num_threads(1)
    rows = measure()
    if MPI.COMM_WORLD.Get_rank() == 0:
        lines = (
            f"{row.operation:14} {f'{row.nbytes:,} B' if row.nbytes else '':>13} {row.engine:12} {row.seconds * 1e6:12,.1f} us "
            f"({row.low * 1e6:,.1f} - {row.high * 1e6:,.1f})  x{row.ratio:.2f}"
            f"{f'  {row.nbytes / row.seconds / 1e6:,.0f} MB/s' if row.nbytes else ''}"
            for row in rows
        )
        tell_measured(rows, lines, as_json)


@hookimpl
def hpctrain_command() -> click.Command:
    return command
