"""hpctrain horovodrun: starts a Horovod script on several ranks, with horovodrun's own options."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hpctrain.errors import UsageError
from hpctrain.starter.horovod_ranks import Numbers, run_over_mpi, run_without_mpi
from hpctrain.starter.hosts import read_hosts
from hpctrain.starter.mpi_library import ask_library

_VARIABLES = {
    "fusion_threshold_mb": "HOROVOD_FUSION_THRESHOLD",
    "cache_capacity": "HOROVOD_CACHE_CAPACITY",
    "timeline_filename": "HOROVOD_TIMELINE",
    "timeline_mark_cycles": "HOROVOD_TIMELINE_MARK_CYCLES",
    "stall_check_warning_time_seconds": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "stall_check_shutdown_time_seconds": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "elastic_timeout": "HOROVOD_ELASTIC_TIMEOUT",
}
_IN_CONFIG = {
    ("params", "fusion_threshold_mb"): "fusion_threshold_mb",
    ("params", "cache_capacity"): "cache_capacity",
    ("timeline", "filename"): "timeline_filename",
    ("timeline", "mark_cycles"): "timeline_mark_cycles",
    ("stall_check", "warning_time_seconds"): "stall_check_warning_time_seconds",
    ("stall_check", "shutdown_time_seconds"): "stall_check_shutdown_time_seconds",
}
_FLAGS_WITHOUT_EFFECT = (
    "--disable-cache", "--autotune", "--hierarchical-allreduce", "--no-hierarchical-allreduce", "--hierarchical-allgather",
    "--no-hierarchical-allgather", "--torus-allreduce", "--no-torus-allreduce", "--tcp", "--mpi-threads-disable",
    "--log-without-timestamp",
)  # fmt: skip
_OPTIONS_WITHOUT_EFFECT = (
    "--cycle-time-ms", "--log-level", "--network-interfaces", "--network-interface", "--autotune-log-file",
    "--autotune-warmup-samples", "--autotune-steps-per-sample", "--autotune-bayes-opt-max-samples",
    "--autotune-gaussian-process-noise", "--binding-args", "--num-nccl-streams", "--thread-affinity", "--gloo-timeout-seconds",
)  # fmt: skip
"""Of the original, so that its command lines work."""


def _without_effect(command: Callable[..., Any]) -> Callable[..., Any]:
    for names, is_flag in ((_FLAGS_WITHOUT_EFFECT, True), (_OPTIONS_WITHOUT_EFFECT, False)):
        for name in names:
            option = click.option(name, is_flag=is_flag, hidden=True, expose_value=False, callback=_tell_useless)
            command = option(command)
    return command


def _tell_useless(context: click.Context, option: click.Parameter, value: object) -> None:
    if value:
        click.echo(f"horovodrun: {option.opts[0]} has no effect here", err=True)


@click.command("horovodrun", context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option("-np", "-n", "--num-proc", "ranks", type=click.IntRange(1), metavar="N", help="The number of ranks.")
@click.option("-H", "--hosts", metavar="HOST:SLOTS,...", help="The hosts, and how many ranks each may run.")
@click.option("--hostfile", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="A file with a line `HOST slots=SLOTS` for each host.")  # fmt: skip
@click.option("-cb", "--check-build", is_flag=True, help="Show what this installation can do, and exit.")
@click.option("--verbose", is_flag=True, help="Print the command that starts the ranks.")
@click.option("--mpi", is_flag=True, help="Communicate over MPI. The default.")
@click.option("--gloo", is_flag=True, help="Communicate over gloo, without MPI.")
@click.option("--min-np", "--min-num-proc", "least", type=click.IntRange(1), metavar="N",
              help="Go on with as few ranks as this, over gloo; lost ranks are replaced.")  # fmt: skip
@click.option("--max-np", "--max-num-proc", "most", type=click.IntRange(1), metavar="N",
              help="Take in as many ranks as this.")  # fmt: skip
@click.option("--host-discovery-script", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="A program that prints a line `HOST:SLOTS` for each host there is at present.")  # fmt: skip
@click.option("--slots", "--slots-per-host", "slots", type=click.IntRange(1), default=1, metavar="N",
              help="Slots of a discovered host that tells none (default: 1).")  # fmt: skip
@click.option("--elastic-timeout", type=click.FloatRange(1), metavar="S",
              help="End a worker that does not come back within this time (default: 600).")  # fmt: skip
@click.option(
    "--reset-limit", type=click.IntRange(0), metavar="N", help="End the job when its ranks have changed more often."
)
@click.option("--start-timeout", type=click.FloatRange(1), default=600.0, metavar="S",
              help="Wait this long for enough ranks (default: 600).")  # fmt: skip
@click.option("--output-filename", "output", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Write each rank's output to files, DIR/rank.N/stdout and stderr.")  # fmt: skip
@click.option(
    "-p", "--ssh-port", type=click.IntRange(1), metavar="PORT", help="The port of the hosts' ssh, with --gloo."
)
@click.option("-i", "--ssh-identity-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="The private key for ssh, with --gloo.")  # fmt: skip
@click.option("--config-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="Options from a YAML file of Horovod's, where the command line has none.")  # fmt: skip
@click.option("--mpi-args", metavar="WORDS", help="More options for mpiexec.")
@click.option("--fusion-threshold-mb", type=click.FloatRange(0), metavar="MB",
              help="The most that small tensors are sent together in (default: 128).")  # fmt: skip
@click.option(
    "--cache-capacity", type=click.IntRange(0), metavar="N", help="Requests that are sent as numbers (default: 1024)."
)
@click.option("--timeline-filename", metavar="FILE", help="Write the operations' history for Chrome's trace viewer.")
@click.option("--timeline-mark-cycles", is_flag=True, help="Mark in it when the ranks agreed.")
@click.option("--no-stall-check", is_flag=True, help="Do not report operations that some ranks never submit.")
@click.option("--stall-check-warning-time-seconds", type=click.FloatRange(0), metavar="S",
              help="Report them after this time (default: 60).")  # fmt: skip
@click.option("--stall-check-shutdown-time-seconds", type=click.FloatRange(0), metavar="S",
              help="End the job after this time (default: never).")  # fmt: skip
@_without_effect
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def command(
    ranks: int | None, hosts: str | None, hostfile: Path | None, check_build: bool, verbose: bool, mpi: bool,
    gloo: bool, least: int | None, most: int | None, host_discovery_script: Path | None, slots: int, reset_limit: int | None,
    start_timeout: float, mpi_args: str | None, output: Path | None, ssh_port: int | None, ssh_identity_file: Path | None,
    config_file: Path | None, command: tuple[str, ...], no_stall_check: bool, **options: Any,
) -> int:  # fmt: skip
    """Run COMMAND, such as `python train.py`, on N ranks; `import horovod` gives hpctrain's in them.

    The ranks run on this machine, or on the given hosts under mpiexec. Under mpiexec or srun, start the script with
    `python -m hpctrain.horovod train.py` instead.
    """
    if check_build:
        click.echo(build())
        return 0
    if hosts is not None and hostfile is not None:
        raise UsageError("found both --hosts and --hostfile, expected one")
    found = read_hosts(hosts, hostfile)
    if config_file is not None:
        no_stall_check |= _take_config(config_file, options)
    os.environ.update(_variables(options, no_stall_check))
    _put_alias_first()
    ssh = [*(["-p", str(ssh_port)] if ssh_port else []), *(["-i", str(ssh_identity_file)] if ssh_identity_file else [])]
    if least is not None or host_discovery_script is not None or gloo:
        if mpi or mpi_args:
            raise UsageError(
                "found --mpi or --mpi-args beside --gloo, --min-np or --host-discovery-script, expected one kind"
            )
        numbers = Numbers(ranks, least, most, slots, reset_limit, start_timeout)
        return run_without_mpi(command, numbers, found, host_discovery_script, output, ssh)
    if ssh:
        raise UsageError(
            "found -p or -i for ranks under MPI, expected --gloo; mpiexec has options of its own (--mpi-args)"
        )
    count = ranks or (found.slots if found else None)
    if count is None or not command:
        missing = "the number of ranks (-np N)" if count is None else "a command such as `python train.py`"
        raise UsageError(f"horovodrun lacks {missing}; expected: hpctrain horovodrun -np N python train.py")
    if found is not None and count > found.slots:
        raise UsageError(f"found -np {count}, but the hosts have {found.slots} slots; expected at most that many ranks")
    return run_over_mpi(command, count, found, (mpi_args or "").split(), output, verbose)


def build() -> str:
    """What `--check-build` prints: X for what is available."""
    import torch

    from hpctrain.horovod import __version__
    from hpctrain.horovod.common.util import nccl_built

    library = ask_library()

    def line(available: object, name: str) -> str:
        return f"    [{'X' if available else ' '}] {name}"

    parts = [
        f"hpctrain's Horovod v{__version__}:", "", "Available Frameworks:",
        line(False, "TensorFlow"), line(True, f"PyTorch {torch.__version__}"), line(False, "MXNet"), "",
        "Available Controllers:", line(library, f"MPI{f' ({library.flavour})' if library else ''}"), line(True, "Gloo"), "",
        "Available Tensor Operations:", line(nccl_built(), "NCCL"), line(False, "DDL"), line(False, "CCL"), line(library, "MPI"),
        line(True, "Gloo"),
    ]  # fmt: skip
    return "\n".join(parts)


def _take_config(file: Path, options: dict[str, Any]) -> bool:
    """Fill in the options that the command line left open; whether the file disables the report of stalls. Raises UsageError."""
    import yaml

    try:
        tables = yaml.safe_load(file.read_text()) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config-file {file} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"--config-file {file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tables, dict):
        raise UsageError(
            f"--config-file {file}: found {type(tables).__name__}, expected sections such as `params:` with options"
        )
    for section, table in tables.items():
        if not isinstance(table, dict | None):
            raise UsageError(f"--config-file {file}: {section}: found {table!r}, expected options")
        for key, value in (table or {}).items():
            name = _IN_CONFIG.get((section, key))
            if name is None and (section, key) != ("stall_check", "enabled"):
                click.echo(f"horovodrun: {section}.{key} of {file} has no effect here", err=True)
            elif name is not None and (options[name] is None or options[name] is False):
                options[name] = _converted(name, value, f"--config-file {file}: {section}.{key}")
    return (tables.get("stall_check") or {}).get("enabled") is False


def _converted(name: str, value: object, where: str) -> object:
    """The value as the option of this name takes it. Raises UsageError."""
    option = next(one for one in command.params if one.name == name)
    try:
        return option.type.convert(value, option, None)
    except click.BadParameter as error:
        raise UsageError(f"{where}: {error.message}") from None


def _variables(options: dict[str, Any], no_stall_check: bool) -> dict[str, str]:
    """HOROVOD_ variables for the options that were given. Raises UsageError for numbers that are none."""
    given = {key: value for key, value in options.items() if value is not None and value is not False}
    for key, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"--{key.replace('_', '-')}: found {value}, expected a finite number")
    if "fusion_threshold_mb" in given:
        given["fusion_threshold_mb"] = int(given["fusion_threshold_mb"] * 1024 * 1024)
    found = {_VARIABLES[key]: "1" if value is True else str(value) for key, value in given.items()}
    return found | ({"HOROVOD_STALL_CHECK_DISABLE": "1"} if no_stall_check else {})


def _put_alias_first() -> None:
    import hpctrain

    directory = Path(hpctrain.__file__).parent / "horovod" / "top_level"
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(directory) + (os.pathsep + before if before else "")
