"""Starts N ranks of `hpctrain run` on this machine: with the installed MPI's mpiexec, or, without MPI, as processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hpctrain.errors import EXIT_TRAINING
from hpctrain.job.check import check
from hpctrain.job.reading import read_job
from hpctrain.starter.link import Link
from hpctrain.starter.mpiexec import Mpiexec, find_mpiexec
from hpctrain.starter.processes import Processes
from hpctrain.starter.relay import Relay
from hpctrain.world.stopping import STOPPING

_POLL = 0.1
"""Seconds between two looks for signals and for ranks that can be told of them."""
_GRACE = 2.0
"""Seconds that a launcher has to notice that its ranks were killed."""


def start_ranks(job: Path, ranks: int, overrides: tuple[str, ...], resume: str) -> int:
    """Check the job, run it on `ranks` ranks and return the job's exit code. HpctrainError as from `check`."""
    check(read_job(job, overrides), ranks)
    mpiexec = find_mpiexec()
    signals: list[int] = []
    for number in STOPPING:
        signal.signal(number, lambda number, _: signals.append(number))
    directory = Path(tempfile.mkdtemp(prefix="hpctrain-"))
    link = Link(directory)
    try:
        return _run(link, mpiexec, _command(job, overrides, resume, directory), ranks, signals)
    finally:
        link.close()
        shutil.rmtree(directory, ignore_errors=True)
        # what comes now is not to change the exit code; a handler would end with the interpreter
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)


def _command(job: Path, overrides: tuple[str, ...], resume: str, directory: Path) -> list[str]:
    sets = [word for override in overrides for word in ("--set", override)]
    return [
        *(sys.executable, "-m", "hpctrain", "run", str(job), *sets),
        *("--resume", resume, "--started-by", str(directory)),
    ]


def _run(link: Link, mpiexec: Mpiexec | None, command: list[str], ranks: int, signals: list[int]) -> int:
    """Start, pass `signals` on, wait. A rank killed from outside ends the others, through mpiexec or `Processes`."""
    process: subprocess.Popen[bytes] | Processes
    relay: Relay | None = None
    if mpiexec is None:
        print("hpctrain: no MPI is installed: the ranks talk over gloo", file=sys.stderr, flush=True)
        process = Processes(command, ranks)
    else:
        # in a session of its own: Ctrl-C must reach the ranks from here, not make mpiexec kill them
        process = subprocess.Popen(
            [*mpiexec.command(ranks), *command],
            env={**os.environ, **mpiexec.environment(ranks), "COLUMNS": str(shutil.get_terminal_size().columns)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        relay = Relay(process)
    try:
        status = _wait(process, link, ranks, signals)
    finally:
        _end(process, link)
        if relay is not None:
            relay.finish()
    code = link.exit_code
    if code is not None:
        return code
    if status == 0:
        return 0
    again = _told_again(signals)
    if again is not None:
        return 128 + again
    print(
        f"hpctrain: a rank ended without a word (the launcher's status is {status}): killed, or out of memory? "
        "The same command continues from the newest checkpoint",
        file=sys.stderr,
    )
    return EXIT_TRAINING


def _wait(process: subprocess.Popen[bytes] | Processes, link: Link, ranks: int, signals: list[int]) -> int | None:
    """The launcher's status; None when it was told twice to stop before all ranks could be asked to."""
    while True:
        try:
            return process.wait(timeout=_POLL)
        except subprocess.TimeoutExpired:
            asked = tuple(signals)
            if asked and link.pass_on(asked) < ranks and _told_again(asked) is not None:
                return None


def _told_again(signals: Sequence[int]) -> int | None:
    """The signal after the first that is more than a request to save."""
    return next((number for number in signals[1:] if number != signal.SIGUSR1), None)


def _end(process: subprocess.Popen[bytes] | Processes, link: Link) -> None:
    """Leave nothing behind, whatever made this process stop waiting."""
    if process.poll() is None:
        link.kill_ranks()
        try:
            process.wait(timeout=_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
