"""hpctrain horovodrun: starts a Horovod script on several ranks, with horovodrun's own options."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import click

from hpctrain.starting.mpi_library import ask_library
from hpctrain.toolkit.commands import UsageError, example, hookimpl, say
from hpctrain_horovod import __version__ as HOROVOD_VERSION  # noqa: N812 - whose interface it is
from hpctrain_horovod.alias import hand_down
from hpctrain_horovod.engine.variables import SWITCHES, VALUES
from hpctrain_horovod.runner.launch import run_commandline
from hpctrain_horovod.starter.hosts import read_hosts
from hpctrain_horovod.starter.ranks import Numbers, run_over_mpi, run_without_mpi

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
_FLAGS_WITHOUT_EFFECT = {
    "--disable-cache": "no check of the hosts is remembered",
    "--autotune": SWITCHES["HOROVOD_AUTOTUNE"],
    "--hierarchical-allreduce": SWITCHES["HOROVOD_HIERARCHICAL_ALLREDUCE"],
    "--no-hierarchical-allreduce": SWITCHES["HOROVOD_HIERARCHICAL_ALLREDUCE"],
    "--hierarchical-allgather": SWITCHES["HOROVOD_HIERARCHICAL_ALLGATHER"],
    "--no-hierarchical-allgather": SWITCHES["HOROVOD_HIERARCHICAL_ALLGATHER"],
    "--torus-allreduce": SWITCHES["HOROVOD_TORUS_ALLREDUCE"],
    "--no-torus-allreduce": SWITCHES["HOROVOD_TORUS_ALLREDUCE"],
    "--tcp": "the MPI library chooses the network; tell it by --mpi-args or its own variables",
    "--mpi-threads-disable": SWITCHES["HOROVOD_MPI_THREADS_DISABLE"],
    "--log-with-timestamp": SWITCHES["HOROVOD_LOG_TIMESTAMP"],
    "--log-without-timestamp": SWITCHES["HOROVOD_LOG_HIDE_TIME"],
    "--log-hide-timestamp": SWITCHES["HOROVOD_LOG_HIDE_TIME"],
    "--no-log-hide-timestamp": SWITCHES["HOROVOD_LOG_HIDE_TIME"],
    "--prefix-output-with-timestamp": "the ranks write to this terminal themselves; --output-filename has a file for each",
}
_OPTIONS_WITHOUT_EFFECT = {
    "--cycle-time-ms": VALUES["HOROVOD_CYCLE_TIME"],
    "--log-level": VALUES["HOROVOD_LOG_LEVEL"],
    "--network-interfaces": VALUES["HOROVOD_GLOO_IFACE"],
    "--network-interface": VALUES["HOROVOD_GLOO_IFACE"],
    "--autotune-log-file": VALUES["HOROVOD_AUTOTUNE_LOG"],
    "--autotune-warmup-samples": VALUES["HOROVOD_AUTOTUNE_WARMUP_SAMPLES"],
    "--autotune-steps-per-sample": VALUES["HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE"],
    "--autotune-bayes-opt-max-samples": VALUES["HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES"],
    "--autotune-gaussian-process-noise": VALUES["HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE"],
    "--binding-args": "the MPI library binds the ranks; tell it by --mpi-args",
    "--num-nccl-streams": VALUES["HOROVOD_NUM_NCCL_STREAMS"],
    "--thread-affinity": VALUES["HOROVOD_THREAD_AFFINITY"],
    "--gloo-timeout-seconds": VALUES["HOROVOD_GLOO_TIMEOUT_SECONDS"],
    "--blacklist-cooldown-range": "no host is blacklisted; one that ssh has lost is tried again after 10 seconds",
}
"""Options of the original, so that its command lines work, and why they change nothing."""
_SO_ANYWAY = ("--no-autotune", "--no-mpi-threads-disable")
_SHORT = {"--prefix-output-with-timestamp": "-prefix-timestamp"}
_NUMBERS = {"--blacklist-cooldown-range": 2}
_NO_JSRUN = "--jsrun: jsrun starts the script itself: `jsrun -n N python -m hpctrain_horovod train.py`"


def _without_effect(command: Callable[..., Any]) -> Callable[..., Any]:
    for name in (*_FLAGS_WITHOUT_EFFECT, *_OPTIONS_WITHOUT_EFFECT, *_SO_ANYWAY):
        names = [name, *([_SHORT[name]] if name in _SHORT else [])]
        option = click.option(
            *names, is_flag=name not in _OPTIONS_WITHOUT_EFFECT, nargs=_NUMBERS.get(name, 1), hidden=True, expose_value=False,
            callback=None if name in _SO_ANYWAY else _tell_useless,
        )  # fmt: skip
        command = option(command)
    return command


def _tell_useless(context: click.Context, option: click.Parameter, value: object) -> None:
    if value:
        name = next(name for name in option.opts if name.startswith("--"))
        why = (_FLAGS_WITHOUT_EFFECT | _OPTIONS_WITHOUT_EFFECT)[name]
        say(f"horovodrun: {name} has no effect here: {why}", err=True)


def _refuse_jsrun(context: click.Context, option: click.Parameter, value: object) -> None:
    if value:
        raise UsageError(_NO_JSRUN)


def _show_version(context: click.Context, option: click.Parameter, value: object) -> None:
    if value:
        say(HOROVOD_VERSION)
        context.exit()


@click.command(
    "horovodrun",
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
    epilog=example("hpctrain horovodrun -np 4 python train.py"),
)
@click.option("-np", "-n", "--num-proc", "ranks", type=click.IntRange(1), metavar="N", help="The number of ranks.")
@click.option("-H", "--hosts", metavar="HOST:SLOTS,...", help="The hosts, and how many ranks each may run.")
@click.option("--hostfile", "-hostfile", "hostfile", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="A file with a line `HOST slots=SLOTS` for each host.")  # fmt: skip
@click.option("-v", "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version,
              help="Show the version of Horovod whose interface this is, and exit.")  # fmt: skip
@click.option("-cb", "--check-build", is_flag=True, help="Show what this installation can do, and exit.")
@click.option("--verbose", is_flag=True, help="Print the command that starts the ranks.")
@click.option("--mpi", is_flag=True, help="Communicate over MPI. The default.")
@click.option("--jsrun", is_flag=True, hidden=True, expose_value=False, callback=_refuse_jsrun)
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
@click.option("--start-timeout", type=click.FloatRange(1), default=600.0, metavar="S", envvar="HOROVOD_START_TIMEOUT",
              help="Wait this long for enough ranks (default: 600, or HOROVOD_START_TIMEOUT).")  # fmt: skip
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
@click.option(
    "--timeline-mark-cycles/--no-timeline-mark-cycles", default=None, help="Mark in it when the ranks agreed."
)
@click.option("--stall-check/--no-stall-check", default=None,
              help="Report operations that some ranks never submit, or do not (default: report).")  # fmt: skip
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
    config_file: Path | None, command: tuple[str, ...], stall_check: bool | None, **options: Any,
) -> int:  # fmt: skip
    """Run COMMAND, such as `python train.py`, on N ranks; `import horovod` gives hpctrain's in them.

    The ranks run on this machine, or on the given hosts under mpiexec. Under mpiexec or srun, start the script with
    `python -m hpctrain_horovod train.py` instead.
    """
    if check_build:
        say(build())
        return 0
    if hosts is not None and hostfile is not None:
        raise UsageError("found both --hosts and --hostfile, expected one")
    found = read_hosts(hosts, hostfile)
    if config_file is not None:
        in_file = _take_config(config_file, options)
        stall_check = in_file if stall_check is None else stall_check
    os.environ.update(_variables(options, stall_check))
    hand_down()
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
    """The text of `--check-build`: X for what is available."""
    import torch

    from hpctrain_horovod.common.util import nccl_built

    library = ask_library()

    def line(available: object, name: str) -> str:
        return f"    [{'X' if available else ' '}] {name}"

    parts = [
        f"hpctrain's Horovod v{HOROVOD_VERSION}:", "", "Available Frameworks:",
        line(False, "TensorFlow"), line(True, f"PyTorch {torch.__version__}"), line(False, "MXNet"), "",
        "Available Controllers:", line(library, f"MPI{f' ({library.flavour})' if library else ''}"), line(True, "Gloo"), "",
        "Available Tensor Operations:", line(nccl_built(), "NCCL"), line(False, "DDL"), line(False, "CCL"), line(library, "MPI"),
        line(True, "Gloo"),
    ]  # fmt: skip
    return "\n".join(parts)


def _take_config(file: Path, options: dict[str, Any]) -> bool | None:
    """Fill in the options that the command line left open; what the file says of the report of stalls. Raises UsageError."""
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
                say(f"horovodrun: {section}.{key} of {file} has no effect here", err=True)
            elif name is not None and options[name] is None:
                options[name] = _converted(name, value, f"--config-file {file}: {section}.{key}")
    enabled: bool | None = (tables.get("stall_check") or {}).get("enabled")
    return enabled


def _converted(name: str, value: object, where: str) -> object:
    """The value as the option of this name takes it. Raises UsageError."""
    option = next(one for one in command.params if one.name == name)
    try:
        return option.type.convert(value, option, None)
    except click.BadParameter as error:
        raise UsageError(f"{where}: {error.message}") from None


def _variables(options: dict[str, Any], stall_check: bool | None) -> dict[str, str]:
    """HOROVOD_ variables for the options that were given. Raises UsageError for numbers that are none."""
    given = {key: value for key, value in options.items() if value is not None and value is not False}
    for key, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"--{key.replace('_', '-')}: found {value}, expected a finite number")
    if "fusion_threshold_mb" in given:
        given["fusion_threshold_mb"] = int(given["fusion_threshold_mb"] * 1024 * 1024)
    found = {_VARIABLES[key]: "1" if value is True else str(value) for key, value in given.items()}
    return found if stall_check is None else found | {"HOROVOD_STALL_CHECK_DISABLE": "0" if stall_check else "1"}


def main() -> None:
    """The program `horovodrun`. Where a real Horovod is installed, too, its own: pip lets the later one of two programs stand."""
    with suppress(PackageNotFoundError):
        for entry in distribution("horovod").entry_points.select(group="console_scripts", name="horovodrun"):
            sys.exit(entry.load()())
    run_commandline()


@hookimpl
def hpctrain_command() -> click.Command:
    return command
