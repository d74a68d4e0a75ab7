"""hpctrain predict: the outputs of a checkpoint's model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from hpctrain.base.errors import UsageError
from hpctrain.cli.options import example, job_arguments, say
from hpctrain.cli.ranks import on_ranks, started_by_option
from hpctrain.toolkit.commands import hookimpl
from hpctrain_tools.options import checkpoint_option, split_option, weights_of_option


@click.command(
    "predict", epilog=example("hpctrain predict job.toml --checkpoint runs/gpt/checkpoints/latest --out outputs.npy")
)
@job_arguments
@checkpoint_option
@split_option
@weights_of_option
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="FILE.npy", help="Where the outputs go.")
@started_by_option
def command(
    job: Path, ranks: int | None, overrides: tuple[str, ...], checkpoint: Path, split: str, weights_of: str | None, out: Path,
    started_by: Path | None,
) -> int:  # fmt: skip
    """Write the outputs of JOB.toml's model for every sample of a split, in the data's order, into a NumPy array.

    The weights are those of a checkpoint. Any layout and number of ranks writes the same array; all ranks must see FILE.npy.
    """
    if out.suffix != ".npy":
        raise UsageError(f"--out {out}: expected a name that ends in .npy")

    def work(*rank: Any) -> int:
        from hpctrain.checkpoint.directory import behind_name
        from hpctrain_tools.inference.answering import answer_on_rank
        from hpctrain_tools.inference.question import Question, answer

        identity, read, channel = rank
        question = Question(behind_name(checkpoint), split, out, weights_of)  # type: ignore[arg-type]
        result = answer_on_rank(identity, read, partial(answer, question), channel)
        if identity.rank == 0:
            say(f"{out}: {tuple(result['shape'])} {result['dtype']}")
        return int(result["exit_code"])

    of = ["--weights-of", weights_of] if weights_of else []
    words = ("--checkpoint", str(checkpoint), "--split", split, "--out", str(out), *of)
    return on_ranks("predict", job, ranks, overrides, words, started_by, work)[0]


@hookimpl
def hpctrain_command() -> click.Command:
    return command
