"""Trains a job on a Ray cluster from a shell, until it has ended: `python -m hpctrain_ray job.toml -n 4`."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.toolkit.commands import set_option


@click.command("hpctrain_ray")
@click.argument("job", metavar="JOB.toml", type=click.Path(path_type=Path))
@click.option(
    "-n", "ranks", type=click.IntRange(min=1), metavar="RANKS", help="The ranks (default: [scheduler.ray]'s)."
)
@click.option("--resume", default="auto", metavar="auto|never|PATH", help="As of `hpctrain run`.")
@set_option
def main(job: Path, ranks: int | None, resume: str, overrides: tuple[str, ...]) -> int:
    """Train JOB.toml on the Ray cluster that its table [scheduler.ray] names."""
    from hpctrain_ray.running import run

    return run(job, ranks, overrides, resume).exit_code


def as_command() -> None:
    """Run `main`; its errors become a sentence and an exit code."""
    import sys

    from hpctrain.api import HpctrainError

    try:
        code = main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except HpctrainError as error:
        print(f"hpctrain: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)


if __name__ == "__main__":
    as_command()
