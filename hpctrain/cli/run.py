"""hpctrain run: trains a job."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from hpctrain.base.errors import EXIT_STOPPED, UsageError
from hpctrain.base.launcher_variables import TYPED
from hpctrain.cli.options import example, job_arguments, say
from hpctrain.cli.ranks import on_ranks, started_by_option


@click.command(
    "run", epilog=example("hpctrain run job.toml -n 4 --set optimizer.lr=1e-3", "srun hpctrain run job.toml")
)
@job_arguments
@click.option("--resume", default="auto", metavar="auto|never|PATH", help="Continue from the newest checkpoint (auto), "
              "from step 0 (never), or from one checkpoint (PATH).")  # fmt: skip
@click.option("--restarts", default=0, type=click.IntRange(min=0), metavar="N", help="Start the ranks again, up to N times, if one "
              "is killed, hangs or fails; they continue from the newest checkpoint.")  # fmt: skip
@click.option("--hostfile", type=click.Path(path_type=Path), metavar="FILE", help="Start the ranks on the hosts of this file, with "
              "a line `HOST slots=N` or `HOST:N` for each.")  # fmt: skip
@click.option(TYPED, hidden=True, expose_value=False, help="Set by the starter for its ranks: its own command.")
@click.option(
    "--begun", type=float, hidden=True, help="Set by the starter for its ranks: when it began, in seconds since 1970."
)
@started_by_option
def command(
    job: Path, ranks: int | None, overrides: tuple[str, ...], resume: str, restarts: int, hostfile: Path | None,
    begun: float | None, started_by: Path | None,
) -> int:  # fmt: skip
    """Train JOB.toml.

    Under mpiexec, mpirun, srun or torchrun this process is one rank, and -n, if given, must equal the number of ranks.
    Without a launcher, -n starts that many ranks, on this machine or the hosts of --hostfile; the default is one, or all slots.
    """
    if resume not in ("auto", "never") and not os.path.exists(resume):  # before any rank starts
        raise UsageError(
            f"--resume {resume}: there is no such checkpoint, or no permission to see it; expected auto, never or a "
            "checkpoint's directory"
        )

    def work(*rank: Any) -> int:
        from hpctrain.training.rank import run_rank

        identity, read, channel = rank
        return int(run_rank(identity, read, resume, channel, begun)["exit_code"])

    code, speaks = on_ranks("run", job, ranks, overrides, ("--resume", resume), started_by, work, restarts, hostfile)
    if speaks:
        options = [*(["-n", str(ranks)] if ranks else []), *(["--hostfile", str(hostfile)] if hostfile else [])]
        _say_how_to_continue(code, job, options, overrides)
    return code


def _say_how_to_continue(code: int, job: Path, options: list[str], overrides: tuple[str, ...]) -> None:
    """Print the command that continues after a signal: without --resume, which would go back to an older checkpoint.

    options: those of the number of ranks and of their hosts.
    """
    if code == EXIT_STOPPED:
        from hpctrain.base.launcher_variables import launched

        where = " (under the same launcher)" if launched() else ""
        words = ["hpctrain", "run", str(job), *options]
        words += [word for override in overrides for word in ("--set", override)]
        with suppress(OSError):  # nobody reads it; the exit code says it, too
            say(f"continue with{where}: {shlex.join(words)}")
