"""Commands that run on ranks: under a launcher as one of them, with -n as the starter of its own, else as the only one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.base.errors import HpctrainError, UsageError
from hpctrain.cli.options import say

if TYPE_CHECKING:
    from hpctrain.contracts.identity import Identity
    from hpctrain.job.raw import RawJob
    from hpctrain.ranks.rank_channel import RankChannel

    Work = Callable[[Identity, Callable[[], RawJob], RankChannel], int]

started_by_option = click.option(
    "--started-by", type=click.Path(path_type=Path), hidden=True, help="Set by the starter (-n) for its ranks."
)


def on_ranks(
    command: str, job: Path, ranks: int | None, overrides: tuple[str, ...], words: Sequence[str], started_by: Path | None,
    work: Work, restarts: int = 0, hostfile: Path | None = None,
) -> tuple[int, bool]:  # fmt: skip
    """Do `work` on each rank; returns the exit code, and whether this process speaks to the user at the end.

    words: the rest of the command line, for the ranks that this process starts. restarts: the number of times that they may start
    again after a failure. hostfile: their hosts; None for this machine.
    """
    from hpctrain.base.launcher_variables import by_srun, launched
    from hpctrain.job.environment import export
    from hpctrain.ranks.detection import detect
    from hpctrain.ranks.signals import note_early

    if command == "run":  # first: to import torch takes seconds, and a signal may come meanwhile
        note_early()
    if not launched() and ((ranks is not None and ranks > 1) or restarts or hostfile):
        return _start(command, job, ranks, overrides, words, restarts, hostfile), True
    if restarts:
        raise UsageError(
            "--restarts: a launcher has started this rank, and only the launcher can start it again; leave it out"
        )
    if hostfile:
        raise UsageError("--hostfile: a launcher has started this rank, on the hosts that it was given; leave it out")
    raw = _read(job, overrides)
    if not isinstance(raw, HpctrainError):
        export(raw.tables)  # before torch is imported below: torch and OpenMP read their variables when they start
    from hpctrain.ranks.rank_channel import RankChannel, attach

    channel = attach(started_by) if started_by else RankChannel()
    from hpctrain.ranks import failure
    from hpctrain.ranks.meeting import PeerError

    if by_srun():  # it sends SIGTERM to ranks that exit later than the first
        failure.delay_terminate()
    with failure.limited("the start of MPI", failure.MPI_START_SECONDS, channel):
        identity = detect()

    def read() -> RawJob:
        """Read the job. Called on rank 0 only, so errors are reported once; the other ranks' reading only gives [environment]."""
        if ranks is not None and ranks != identity.size:
            raise UsageError(
                f"-n {ranks}: the launcher started {identity.size} ranks; expected the same number (or leave -n out)"
            )
        if isinstance(raw, HpctrainError):
            raise raw
        return raw

    try:
        code = work(identity, read, channel)
    except Exception as error:  # the only rank's: of several, the failing one has ended all
        code = failure.exit_code_of(error)
        if isinstance(error, PeerError):  # rank 0 reports the error; this one is only its echo
            channel.report_exit(code)
            return code, False
        channel.report_error(failure.in_a_line(error, identity))
        channel.report_exit(code)
        if isinstance(error, HpctrainError):
            raise
        say(failure.describe(error, identity), err=True)
    if by_srun():
        failure.ignore_terminate()
    return code, identity.rank == 0 and started_by is None


def _start(
    command: str, job: Path, ranks: int | None, overrides: Sequence[str], words: Sequence[str], restarts: int, hostfile: Path | None
) -> int:  # fmt: skip
    """The exit code of ranks that the command `start` starts. It is found like a plugin's: the core imports no tool."""
    from hpctrain.cli.groups import offers

    start = next((offer for offer in offers("", ()) if offer.name == "start"), None)
    if start is None:
        raise UsageError("-n: no package that starts ranks is installed; start them with mpiexec, srun or torchrun")
    options = [f"--restarts={restarts}", *(["-n", str(ranks)] if ranks else []), *(f"--set={key}" for key in overrides)]
    options += [f"--hostfile={hostfile}"] if hostfile else []
    code = start.load().main([*options, command, "--", str(job), *words], "hpctrain start", standalone_mode=False)
    return int(code)


def _read(path: Path, overrides: Sequence[str]) -> RawJob | HpctrainError:
    """The job of the file, or the error of reading it."""
    from hpctrain.job.reading import read_job

    try:
        return read_job(path, overrides)
    except HpctrainError as error:
        return error
