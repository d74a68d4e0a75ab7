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
    """Do `work` on each rank; the exit code, and whether this process speaks to the user at the end.

    words: the rest of the command line, for the ranks that this process starts; restarts: how often they start again if they fail;
    hostfile: where, None for this machine.
    """
    from hpctrain.base.launcher_variables import by_srun, launched
    from hpctrain.ranks.detection import detect
    from hpctrain.ranks.signals import note_early

    if command == "run":  # first of all: to import torch takes seconds
        note_early()
    if not launched() and ((ranks is not None and ranks > 1) or restarts or hostfile):
        return _start(command, job, ranks, overrides, words, restarts, hostfile), True
    if restarts:
        raise UsageError(
            "--restarts: a launcher has started this rank, and only the launcher can start it again; leave it out"
        )
    if hostfile:
        raise UsageError("--hostfile: a launcher has started this rank, on the hosts that it was given; leave it out")
    first_read = _Read(job, overrides)
    first_read.export()  # before torch is imported below: torch and OpenMP read their variables when they start
    from hpctrain.ranks.rank_channel import RankChannel, attach

    channel = attach(started_by) if started_by else RankChannel()
    from hpctrain.ranks.failure import delay_terminate, describe, exit_code_of, ignore_terminate, in_a_line

    if by_srun():
        delay_terminate()
    from hpctrain.ranks.failure import MPI_START_SECONDS, limited
    from hpctrain.ranks.meeting import PeerError

    with limited("the start of MPI", MPI_START_SECONDS, channel):
        identity = detect()

    def read() -> RawJob:
        """Read the job. Called on rank 0 only, so a wrong -n is reported once."""
        if ranks is not None and ranks != identity.size:
            raise UsageError(
                f"-n {ranks}: the launcher started {identity.size} ranks; expected the same number (or leave -n out)"
            )
        return first_read.job()

    try:
        code = work(identity, read, channel)
    except Exception as error:  # the only rank's: with several ranks, the failing rank has ended all
        code = exit_code_of(error)
        if isinstance(error, PeerError):  # rank 0 tells the error, whose text must not come second
            channel.report_exit(code)
            return code, False
        channel.report_error(in_a_line(error, identity))
        channel.report_exit(code)
        if isinstance(error, HpctrainError):
            raise
        say(describe(error, identity), err=True)
    if by_srun():
        ignore_terminate()
    return code, identity.rank == 0 and started_by is None


def _start(
    command: str, job: Path, ranks: int | None, overrides: Sequence[str], words: Sequence[str], restarts: int, hostfile: Path | None
) -> int:  # fmt: skip
    """The exit code of ranks that the command `start` starts, which comes as those of any plugin."""
    from hpctrain.cli.groups import offers

    start = next((offer for offer in offers("", ()) if offer.name == "start"), None)
    if start is None:
        raise UsageError("-n: no package that starts ranks is installed; start them with mpiexec, srun or torchrun")
    options = [f"--restarts={restarts}", *(["-n", str(ranks)] if ranks else []), *(f"--set={one}" for one in overrides)]
    options += [f"--hostfile={hostfile}"] if hostfile else []
    code = start.load().main([*options, command, "--", str(job), *words], "hpctrain start", standalone_mode=False)
    return int(code)


class _Read:
    """The job file, read once. Rank 0's is the job of all ranks; the others' only gives [environment]."""

    def __init__(self, path: Path, overrides: Sequence[str]) -> None:
        from hpctrain.job.reading import read_job

        self._job, self._error = None, None
        try:
            self._job = read_job(path, overrides)
        except HpctrainError as error:  # told by rank 0 only
            self._error = error

    def export(self) -> None:
        """Set the variables of [environment]. A rank that can't read the file sets none."""
        from hpctrain.job.environment import export

        if self._job is not None:
            export(self._job.tables)

    def job(self) -> RawJob:
        """Raises the error of reading."""
        if self._job is None:
            assert self._error is not None
            raise self._error
        return self._job
