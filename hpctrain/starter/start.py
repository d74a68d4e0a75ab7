"""Starts N ranks of `hpctrain run` on this machine, passes signals on to them, and returns the job's exit code."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hpctrain.checking.check import check
from hpctrain.errors import EXIT_TRAINING
from hpctrain.job.reading import read_job
from hpctrain.starter.launch import Launched, launch
from hpctrain.starter.link import Link
from hpctrain.world.stopping import STOPPING

_POLL = 0.1
"""Seconds between two looks for signals and for ranks that can be told of them."""
_GRACE = 2.0
"""Seconds that a launcher has to notice that its ranks were killed."""


def start_ranks(job: Path, ranks: int, overrides: tuple[str, ...], resume: str) -> int:
    """Check the job, run it on `ranks` ranks and return the job's exit code. HpctrainError as from `check`."""
    check(read_job(job, overrides), ranks)
    signals: list[int] = []
    for number in STOPPING:
        signal.signal(number, lambda number, _: signals.append(number))
    directory = Path(tempfile.mkdtemp(prefix="hpctrain-"))
    link = Link(directory)
    try:
        launched = launch(_command(job, overrides, resume, directory), ranks, directory)
        return _attend(launched, link, ranks, signals)
    finally:
        link.close()
        shutil.rmtree(directory, ignore_errors=True)
        # a signal that comes now must not change the exit code; a handler would end with the interpreter
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)


def _command(job: Path, overrides: tuple[str, ...], resume: str, directory: Path) -> list[str]:
    sets = [word for override in overrides for word in ("--set", override)]
    return [
        *(sys.executable, "-m", "hpctrain", "run", str(job), *sets),
        *("--resume", resume, "--started-by", str(directory)),
    ]


def _attend(launched: Launched, link: Link, ranks: int, signals: list[int]) -> int:
    """Pass `signals` on and wait. A rank killed from outside ends the others: `launched` sees to that."""
    try:
        status = _wait(launched, link, ranks, signals)
    finally:
        _end(launched, link)
    code = link.exit_code
    if code is not None:
        return code
    if status == 0:
        return 0
    again = _told_again(signals)
    if again is not None:
        return 128 + again
    print(
        f"hpctrain: a rank ended without a word (status {status}): killed, or out of memory? "
        "The same command continues from the newest checkpoint",
        file=sys.stderr,
    )
    return EXIT_TRAINING


def _wait(launched: Launched, link: Link, ranks: int, signals: list[int]) -> int | None:
    """The status of `launched`; None after a second request to stop that came before all ranks could answer the first."""
    while True:
        try:
            return launched.wait(timeout=_POLL)
        except subprocess.TimeoutExpired:
            asked = tuple(signals)
            if asked and link.pass_on(asked) < ranks and _told_again(asked) is not None:
                return None


def _told_again(signals: Sequence[int]) -> int | None:
    """The signal after the first that is more than a request to save."""
    return next((number for number in signals[1:] if number != signal.SIGUSR1), None)


def _end(launched: Launched, link: Link) -> None:
    """Leave nothing behind, whatever made this process stop waiting."""
    give_up = time.monotonic() + _GRACE
    while launched.poll() is None and time.monotonic() < give_up:
        link.kill_ranks()  # again and again: some may still be coming up
        with suppress(subprocess.TimeoutExpired):
            launched.wait(timeout=_POLL)
    if launched.poll() is None:
        launched.kill()
