"""hpctrain bench checkpoint: measures a checkpoint format on this machine's disks."""

from __future__ import annotations

import shutil
from pathlib import Path

import click
from pydantic import ByteSize, TypeAdapter, ValidationError

from hpctrain.base.launcher_variables import launched
from hpctrain.base.safe_files import closed_directory
from hpctrain.toolkit.commands import UsageError, example, hookimpl
from hpctrain_tools.bench import start_measuring, tell_measured


@click.command("checkpoint", epilog=example("hpctrain bench checkpoint --size 256MB --ranks 2"))
@click.option("-n", "--ranks", type=click.IntRange(min=1), default=2, show_default=True, help="Number of ranks.")
@click.option("--size", default="1GB", show_default=True, help="Bytes of the state over all ranks.")
@click.option("--format", "name", default="hdf5", show_default=True, help="The checkpoint format to measure.")
@click.option(
    "--directory", default=".", type=click.Path(path_type=Path, file_okay=False), help="Where to write (default: here)."
)
@click.option(
    "--rounds",
    default=5,
    show_default=True,
    type=click.IntRange(min=1),
    help="Rounds; medians and quartiles are printed.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON array instead of a table.")
def command(ranks: int, size: str, name: str, directory: Path, rounds: int, as_json: bool) -> int:
    """Measure writing and reading a state, against plain files, torch.save and DCP.

    Under mpiexec or srun every process is a rank; otherwise the command starts its own ranks.
    """
    from hpctrain.registry.registry import build_registry

    try:
        nbytes = TypeAdapter(ByteSize).validate_python(size)
    except ValidationError:
        raise UsageError(f"--size {size}: expected bytes, such as 500MB or 1GiB") from None
    if not directory.is_dir():
        raise UsageError(f"--directory {directory}: there is no such directory")
    format = next((one for one in build_registry().instances("checkpoint") if one.name == name), None)
    if format is None:
        raise UsageError(f"--format {name}: no installed checkpoint format has this name")
    if not launched():
        words = ["checkpoint", "--size", size, "--format", name, "--directory", str(directory), "--rounds", str(rounds)]
        return start_measuring(ranks, words, as_json)
    import torch
    import torch.distributed as dist

    from hpctrain.api import broadcast_value, mpi_backend
    from hpctrain_tools.bench.checkpoint import measure

    torch.set_num_threads(1)
    dist.init_process_group(mpi_backend(), init_method="mpi://")
    made = str(closed_directory("bench-", directory)) if dist.get_rank() == 0 else ""
    scratch = broadcast_value(made)
    try:
        rows = measure(format, nbytes, Path(scratch), rounds)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(scratch, ignore_errors=True)
    if dist.get_rank() == 0:
        lines = (
            f"{row.operation:18} {row.method:12} {row.seconds:8.3f} s ({row.low:.3f} - {row.high:.3f}) "
            f"{row.nbytes / row.seconds / 1e6:9,.0f} MB/s  x{row.ratio:.2f}"
            for row in rows
        )
        tell_measured(rows, lines, as_json)
    return 0


@hookimpl
def hpctrain_command() -> click.Command:
    return command
