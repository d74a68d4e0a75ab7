"""Starts the ranks of a command such as `hpctrain run`, here or on hosts of a hostfile, passes signals on, returns their code."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.base.child_python import python_module
from hpctrain.base.errors import EXIT_ENVIRONMENT, EXIT_TRAINING
from hpctrain.base.launcher_variables import TYPED
from hpctrain.base.safe_files import scratch_directory
from hpctrain.job.environment import export
from hpctrain.job.reading import read_job
from hpctrain_tools.launch.channel_directory import ChannelDirectory, StarterChannel, sweep
from hpctrain_tools.launch.forking import prepare
from hpctrain_tools.launch.hosts import Hosts
from hpctrain_tools.launch.on_hosts import OnHosts
from hpctrain_tools.launch.placement import Placement
from hpctrain_tools.launch.processes import Launched, StartRank, launch, spawn
from hpctrain_tools.launch.stop_requests import Signals, noted_signals

# seconds between checks for signals, and for ranks that can receive them
_POLL = 0.1
RESUME_NEWEST = ("--resume", "auto")
"""The words with which `hpctrain run` continues from the newest checkpoint."""
# seconds by which a file system may round its times
_COARSE = 1.0
# seconds for a launcher to notice that its ranks were killed
_GRACE = 2.0


@dataclass(frozen=True)
class _Ended:
    """How a start ended. again: whether another one may do better. host: the first on which a rank failed, if known."""

    code: int
    again: bool = False
    host: str | None = None


def start_ranks(
    command: str,
    job: Path,
    ranks: int | None,
    overrides: tuple[str, ...],
    words: Sequence[str],
    restarts: int = 0,
    hostfile: Path | None = None,
) -> int:
    """Start `hpctrain COMMAND JOB WORDS...` and return the ranks' exit code. HpctrainError as from `read_job`, `Placement`.

    ranks: how many (None: as many as the hostfile has slots, else one). restarts: how often ranks that fail start again. The ranks
    check the job.
    """
    tables = read_job(job, overrides).tables
    export(tables)  # here: an mpiexec reads its own before there is a rank
    sets = [word for override in overrides for word in ("--set", override)]
    placement = Placement(hostfile, ranks)
    begin, restart = time.time(), 0
    with noted_signals() as signals:
        hosts, count = _next(placement, command)
        signals.has_ranks = False
        start = prepare(command, tables) if hosts is None else spawn
        signals.has_ranks = True
        while True:
            typed = shlex.join(["hpctrain", *sys.argv[1:]])
            told = ("--begun", f"{begin:.3f}", TYPED, typed) if command == "run" else ()
            program = [command, str(job), *sets, *words, *told]
            saves = _checkpoints_of(tables) if command == "run" else None
            ended = _start_once(program, hosts, count, signals, saves, start)
            if ended.host is not None:
                placement.note_failure(ended.host)
            if signals or not ended.again or restart == restarts:
                return ended.code
            restart += 1
            print(f"hpctrain: restart {restart} of {restarts}", file=sys.stderr, flush=True)
            words = RESUME_NEWEST if _has_saved(_checkpoints_of(tables), begin) else words
            hosts, count = _next(placement, command)


def _next(placement: Placement, command: str) -> tuple[Hosts | None, int]:
    """The hosts and ranks of the next start, which is announced."""
    hosts, count = placement.next()
    if command == "run":
        where = "" if hosts is None or hosts.are_here else f" on {', '.join(name for name, _ in hosts.named)}"
        print(f"starting     {count} rank{'s' if count > 1 else ''}{where}", flush=True)
    return hosts, count


def start_command(words: Sequence[str], ranks: int) -> int:
    """Start `hpctrain WORDS...` on `ranks` ranks and return their exit code."""
    with noted_signals() as signals:
        return _start_once(words, None, ranks, signals, None, spawn).code


def _checkpoints_of(tables: Mapping[str, Any]) -> Path:
    """The directory of the run's checkpoints. The ranks report a [job] of wrong types."""
    table = tables.get("job")
    given = table if isinstance(table, dict) else {}
    return Path(str(given.get("output_dir") or Path("runs") / str(given.get("name")))) / "checkpoints"


def _has_saved(checkpoints: Path, begin: float = 0.0) -> bool:
    """Whether the run has a checkpoint from after `begin`. Until then, ranks start again as they did."""
    return any(path.stat().st_mtime >= begin - _COARSE for path in checkpoints.glob("step-*[0-9]"))


def _start_once(
    words: Sequence[str],
    hosts: Hosts | None,
    ranks: int,
    signals: Signals,
    saves: Path | None,
    start: StartRank,
) -> _Ended:
    """hosts: with as many slots as ranks; None for this machine. saves: where the command's checkpoints are, if it makes any.
    start: starts a rank on this machine."""
    command = python_module("hpctrain", *words)
    if hosts is not None and not hosts.are_here:
        remote = OnHosts(command, hosts)
        code = _attend(remote, remote, ranks, signals, saves)
        again, host = code == EXIT_TRAINING or remote.why_not_started is not None, remote.failed_host
    else:
        sweep("hpctrain-????????")
        with scratch_directory() as directory, closing(ChannelDirectory(directory)) as link:
            launched = launch([*command, "--started-by", str(directory)], ranks, directory, start)
            code = _attend(launched, link, ranks, signals, saves)
        failed = launched.failed_rank
        again, host = code == EXIT_TRAINING, None if hosts is None or failed is None else hosts.by_rank[failed]
    return _Ended(code, again, host if again else None)


def _attend(launched: Launched, link: StarterChannel, ranks: int, signals: Signals, saves: Path | None) -> int:
    """Pass signals on and wait. If a rank is killed from outside, `launched` ends the others."""
    try:
        status = _wait(launched, link, ranks, signals)
    finally:
        _end(launched, link)
    code = link.exit_code
    if code is not None:
        return code
    if status == 0:
        return 0
    if signals.again is not None:
        return 128 + signals.again
    if link.why_not_started is not None:
        print(f"hpctrain: {link.why_not_started}", file=sys.stderr)
        return EXIT_ENVIRONMENT
    who = "a rank" if launched.failed_rank is None else f"rank {launched.failed_rank}"
    where = "" if link.failed_host is None else f" on {link.failed_host}"
    how = signal.Signals(-status).name if status is not None and status < 0 else f"status {status}"
    why = f"{who}{where} ended without an error message ({how}): killed, or out of memory?"
    print(f"hpctrain: {why}" + ("" if saves is None else _what_continues(saves)), file=sys.stderr)
    if saves is not None:
        from hpctrain.training.log_file import note_killed

        note_killed(saves.parent, launched.failed_rank or 0, why)
    return EXIT_TRAINING


def _what_continues(checkpoints: Path) -> str:
    if _has_saved(checkpoints):
        return " The same command continues from the newest checkpoint"
    return " There is no checkpoint yet: the same command begins at step 0; [checkpoint] every_steps saves on the way"


def _wait(launched: Launched, link: StarterChannel, ranks: int, signals: Signals) -> int | None:
    """The status of `launched`; None if a second request to stop arrives before all ranks can answer the first."""
    while True:
        try:
            return launched.wait(timeout=_POLL)
        except subprocess.TimeoutExpired:
            if signals and link.pass_on(tuple(signals)) < ranks and signals.again is not None:
                return None


def _end(launched: Launched, link: StarterChannel) -> None:
    """End all ranks, whatever made this process stop waiting."""
    give_up = time.monotonic() + _GRACE
    while launched.poll() is None and time.monotonic() < give_up:
        link.kill_ranks()  # repeatedly: some may still be starting
        with suppress(subprocess.TimeoutExpired):
            launched.wait(timeout=_POLL)
    if launched.poll() is None:
        launched.kill()
