"""hpctrain run: a rank under a launcher, the starter of its own ranks with -n, else the only rank."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from pathlib import Path

import click

from hpctrain.cli.options import job_arguments
from hpctrain.errors import EXIT_STOPPED, HpctrainError, UsageError


@click.command("run")
@job_arguments
@click.option("--resume", default="auto", metavar="auto|never|PATH", help="Continue from the newest checkpoint (auto), "
              "from step 0 (never), or from one checkpoint (PATH).")  # fmt: skip
@click.option(
    "--started-by", type=click.Path(path_type=Path), hidden=True, help="Set by `hpctrain run -n` for its ranks."
)
def command(job: Path, ranks: int | None, overrides: tuple[str, ...], resume: str, started_by: Path | None) -> int:
    """Train JOB.toml.

    Under mpiexec, mpirun, srun or torchrun this process is one rank, and -n, where given, must equal their number.
    Alone, -n starts that many ranks on this machine; without -n there is one.
    """
    if resume not in ("auto", "never") and not os.path.exists(resume):
        raise UsageError(
            f"--resume {resume}: there is no such checkpoint, or no permission to see it; expected auto, never or a "
            "checkpoint's directory"
        )
    from hpctrain.world.detection import detect, launched, started_by_srun

    if not launched() and ranks is not None and ranks > 1:
        from hpctrain.starter.start import start_ranks

        code = start_ranks(job, ranks, overrides, resume)
        _say_how_to_continue(code, job, ranks, overrides)
        return code
    from hpctrain.job.reading import RawJob, read_job
    from hpctrain.rank import run_rank
    from hpctrain.starter.link import attach
    from hpctrain.world.failure import delay_terminate, describe, exit_code_of, ignore_terminate
    from hpctrain.world.launcher_channel import LauncherChannel

    if started_by_srun():
        delay_terminate()
    channel = attach(started_by) if started_by else LauncherChannel()
    identity = detect()

    def read() -> RawJob:
        """Read the job; only rank 0 does, so a wrong -n is told once."""
        if ranks is not None and ranks != identity.size:
            raise UsageError(
                f"-n {ranks}: the launcher started {identity.size} ranks; expected the same number (or leave -n out)"
            )
        return read_job(job, overrides)

    try:
        code = int(run_rank(identity, read, resume, channel)["exit_code"])
    except HpctrainError:
        raise
    except Exception as error:  # of the only rank: of several, the one that failed has ended all
        click.echo(describe(error, identity), err=True)
        code = exit_code_of(error)
    if started_by_srun():
        ignore_terminate()
    if identity.rank == 0 and started_by is None:
        _say_how_to_continue(code, job, ranks, overrides, " (under the same launcher)" if launched() else "")
    return code


def _say_how_to_continue(code: int, job: Path, ranks: int | None, overrides: tuple[str, ...], where: str = "") -> None:
    """After a signal: the same command, without --resume, which would go back to an older checkpoint."""
    if code == EXIT_STOPPED:
        words = ["hpctrain", "run", str(job), *(["-n", str(ranks)] if ranks else [])]
        words += [word for override in overrides for word in ("--set", override)]
        with suppress(OSError):  # nobody reads it any more; the exit code says it, too
            click.echo(f"continue with{where}: {shlex.join(words)}")
