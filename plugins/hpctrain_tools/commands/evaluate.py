"""hpctrain evaluate: the metrics of a checkpoint."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from hpctrain.cli.options import example, job_arguments, say
from hpctrain.cli.ranks import on_ranks, started_by_option
from hpctrain.toolkit.commands import hookimpl
from hpctrain_tools.options import checkpoint_option, split_option, weights_of_option


@click.command("evaluate", epilog=example("hpctrain evaluate job.toml -n 2 --checkpoint runs/gpt/checkpoints/best"))
@job_arguments
@checkpoint_option
@split_option
@weights_of_option
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
@started_by_option
def command(
    job: Path, ranks: int | None, overrides: tuple[str, ...], checkpoint: Path, split: str, weights_of: str | None, as_json: bool,
    started_by: Path | None,
) -> int:  # fmt: skip
    """Evaluate the model of JOB.toml with the weights of a checkpoint: the loss and the job's metrics over a split.

    Any layout and number of ranks gives the same figures; -n and launchers are as for `hpctrain run`.
    """

    def work(*rank: Any) -> int:
        from hpctrain.checkpoint.directory import behind_name
        from hpctrain_tools.inference.answering import answer_on_rank
        from hpctrain_tools.inference.question import Question, answer

        identity, read, channel = rank
        question = Question(behind_name(checkpoint), split, kept_by=weights_of)  # type: ignore[arg-type]
        result = answer_on_rank(identity, read, partial(answer, question), channel)
        code = int(result.pop("exit_code"))
        if identity.rank == 0:
            _show(result, checkpoint, split, as_json)
        return code

    of = ["--weights-of", weights_of] if weights_of else []
    words = ("--checkpoint", str(checkpoint), "--split", split, *of, *(["--json"] if as_json else []))
    return on_ranks("evaluate", job, ranks, overrides, words, started_by, work)[0]


def _show(result: dict[str, Any], checkpoint: Path, split: str, as_json: bool) -> None:
    if as_json:
        say(json.dumps(result))
        return
    say(f"{checkpoint} on the {split} split:")
    for name, value in result.items():
        say(f"  {name:<12} {value:,}" if isinstance(value, int) else f"  {name:<12} {value:.6g}")


@hookimpl
def hpctrain_command() -> click.Command:
    return command
