"""hpctrain bench: measures this machine."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from hpctrain.base.safe_files import scratch_directory
from hpctrain.cli.groups import OpenGroup
from hpctrain.cli.options import example, say
from hpctrain.toolkit.commands import hookimpl
from hpctrain_tools.bench import start_measuring


@click.group("bench", cls=OpenGroup)
def command() -> None:
    """Benchmarks of this machine, and of jobs on it."""


@command.command("machine", epilog=example("hpctrain bench machine -n 4 --output machine.toml"))
@click.option("-n", "ranks", type=click.IntRange(min=1), default=2, show_default=True, help="Number of ranks.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the table to this file, for plan --machine.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON instead of TOML.")
def machine(ranks: int, output: Path | None, as_json: bool) -> None:
    """Measure this machine's figures for `hpctrain plan`: products, memory, collectives, with all ranks at work.

    Under mpiexec or srun every process is a rank, on as many nodes as there are; otherwise the command starts its own ranks here.
    """
    from hpctrain.base.launcher_variables import launched

    if not launched():
        words = ["machine", *(["--output", str(output)] if output else [])]
        sys.exit(start_measuring(ranks, words, as_json))
    import tomli_w
    import torch.distributed as dist

    from hpctrain.ranks.json_collectives import broadcast_value
    from hpctrain_tools.bench.machine import measure, train_small

    with scratch_directory("bench-") as directory:
        small = train_small(f"{directory}/run")
        device, node = _meet_on_device()
        first = broadcast_value(str(directory))
    shutil.rmtree(first, ignore_errors=True)  # on each node
    found = measure(device, node, small)
    if dist.get_rank() == 0:
        text = tomli_w.dumps({"machine": found})
        if output is not None:
            output.write_text(text)
        say(json.dumps(found) if as_json else text, nl=False)


def _meet_on_device() -> tuple[Any, str]:
    """Join the other ranks, each on its accelerator if there are some; the device and the node's name."""
    import torch.distributed as dist

    import hpctrain.mpi
    from hpctrain.base.devices import device_of_rank, is_accelerator, use_device
    from hpctrain.ranks.detection import detect

    identity = detect()
    device = device_of_rank(identity.local_rank)
    use_device(device)
    if is_accelerator(device):
        name = dist.Backend.default_device_backend_map[device.type]
        dist.init_process_group(f"cpu:{hpctrain.mpi.BACKEND},{device.type}:{name}", init_method="mpi://")
    else:
        dist.init_process_group(hpctrain.mpi.BACKEND, init_method="mpi://")
    return device, identity.node


@hookimpl
def hpctrain_command() -> click.Command:
    return command
