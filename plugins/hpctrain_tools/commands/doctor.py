"""hpctrain doctor: checks the machine before a job is trained on it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.base.errors import EXIT_ENVIRONMENT, EnvironmentUnfitError, HpctrainError
from hpctrain.cli.options import example, say
from hpctrain.cli.ranks import started_by_option
from hpctrain.job.environment import cached_on_node
from hpctrain.toolkit.commands import hookimpl

if TYPE_CHECKING:
    from hpctrain_tools.doctor.findings import FindingOfRanks

# the limit of MPI_Init: shorter than a job's, as somebody waits for the answer
_START_SECONDS = 120.0


@click.command("doctor", epilog=example("srun -N2 --ntasks-per-node=4 hpctrain doctor --directory runs"))
@click.option("-n", "ranks", type=click.IntRange(min=1), help="Number of ranks to start on this machine; under a launcher, "
              "the number that it started.")  # fmt: skip
@click.option(
    "--directory", default=".", type=click.Path(path_type=Path), help="The output directory to check (default: here)."
)
@click.option("--json", "as_json", is_flag=True, help="A JSON object on each line, for each finding.")
@started_by_option
@cached_on_node()
def command(ranks: int | None, directory: Path, as_json: bool, started_by: Path | None) -> int:
    """Check the machine before a job is trained: the start, the nodes, the output directory, and the network.

    Prints ok, warn or fail for each check, with what was found and what to do. Exits with 3 if a check fails. Under srun, mpiexec
    or torchrun every process is a rank, as for `hpctrain run`.
    """
    from hpctrain.base.launcher_variables import launched
    from hpctrain.ranks.detection import detect

    if not launched() and ranks is not None and ranks > 1:
        from hpctrain_tools.launch.start import start_command

        words = ["doctor", "--directory", str(directory), *(["--json"] if as_json else [])]
        return start_command(words, ranks)
    from hpctrain.ranks.failure import end_on_signals, limited
    from hpctrain.ranks.rank_channel import RankChannel, attach
    from hpctrain_tools.doctor.examine import examine
    from hpctrain_tools.doctor.findings import Finding, row_of
    from hpctrain_tools.doctor.node import loopback

    channel = attach(started_by) if started_by else RankChannel()
    end_on_signals(channel)
    shown = _Shown(as_json)
    try:
        with limited("the start of MPI", _START_SECONDS, channel):
            identity = detect()
    except EnvironmentUnfitError as error:
        shown.show([row_of(Finding("launcher", "fail", str(error), "start the ranks as it says"), [], [])], 0)
        shown.end()
        return EXIT_ENVIRONMENT
    looped = loopback()
    if looped is not None:  # the ranks would wait for each other
        if identity.local_rank == 0:
            shown.show([row_of(looped, [], [])], 0)
            shown.end()
        channel.report_exit(EXIT_ENVIRONMENT)
        return EXIT_ENVIRONMENT
    try:
        code = examine(identity, channel, directory, ranks, shown.show)
    except HpctrainError as error:
        channel.report_exit(error.exit_code)
        raise
    if identity.rank == 0:
        shown.end()
    return code


class _Shown:
    """Prints rows as they come: what was found is on the screen, however the checks end."""

    def __init__(self, as_json: bool) -> None:
        self._as_json, self._states = as_json, list[str]()

    def show(self, rows: list[FindingOfRanks], ranks: int) -> None:
        from hpctrain_tools.doctor.findings import lines

        self._states += [row.state for row in rows]
        for line in (json.dumps(asdict(row)) for row in rows) if self._as_json else lines(rows, ranks):
            say(line)

    def end(self) -> None:
        if not self._as_json:
            say(f"doctor       {self._states.count('fail')} failed, {self._states.count('warn')} to look at")


@hookimpl
def hpctrain_command() -> click.Command:
    return command
