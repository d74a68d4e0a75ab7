"""hpctrain sample: a text that a checkpoint's language model continues."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from hpctrain.cli.options import example, job_arguments
from hpctrain.cli.ranks import on_ranks, started_by_option
from hpctrain.toolkit.commands import hookimpl
from hpctrain_tools.options import checkpoint_option, weights_of_option

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@click.command(
    "sample", epilog=example("hpctrain sample job.toml --checkpoint runs/gpt/checkpoints/best --prompt 'Once'")
)
@job_arguments
@checkpoint_option
@weights_of_option
@click.option("--prompt", required=True, help="The beginning of the text.")
@click.option("--tokens", type=click.IntRange(min=1), default=100, show_default=True, help="How many to add.")
@click.option("--temperature", type=click.FloatRange(min=0), default=1.0, show_default=True,
              help="Below 1 likely tokens become likelier; 0 always takes the most likely one.")  # fmt: skip
@click.option("--top-k", type=click.IntRange(min=1), help="Draw from so many of the most likely tokens only.")
@click.option("--seed", type=click.IntRange(min=0, max=2**63 - 1), default=0, show_default=True, help="Of the draws.")
@started_by_option
def command(
    job: Path, ranks: int | None, overrides: tuple[str, ...], checkpoint: Path, weights_of: str | None, prompt: str,
    tokens: int, temperature: float, top_k: int | None, seed: int, started_by: Path | None,
) -> int:  # fmt: skip
    """Continue a text with the language model of JOB.toml and the weights of a checkpoint.

    The job's dataset encodes and decodes text: `text`, `stdlib-text`, or a plugin's. Any layout and number of ranks gives the same
    text, up to rounding.
    """

    def work(*rank: Any) -> int:
        from hpctrain.checkpoint.directory import behind_name
        from hpctrain.ranks.prints import own
        from hpctrain_tools.inference.answering import answer_on_rank
        from hpctrain_tools.inference.sampling import Prompt, sample

        identity, read, channel = rank
        speaks = identity.rank == 0

        def say(text: str) -> None:
            if speaks:
                # the weights may be another person's, and a terminal does what a text says
                click.echo(_CONTROLS.sub("\ufffd", text) if channel.terminal else text, file=own(sys.stdout), nl=False)

        asked = Prompt(prompt, tokens, temperature, top_k, seed)
        answer = partial(sample, asked, say, behind_name(checkpoint), weights_of)
        code = int(answer_on_rank(identity, read, answer, channel)["exit_code"])
        say("\n")
        return code

    words = ["--checkpoint", str(checkpoint), "--prompt", prompt, "--tokens", str(tokens)]
    words += ["--temperature", str(temperature), "--seed", str(seed)]
    words += ["--top-k", str(top_k)] if top_k is not None else []
    words += ["--weights-of", weights_of] if weights_of else []
    return on_ranks("sample", job, ranks, overrides, words, started_by, work)[0]


@hookimpl
def hpctrain_command() -> click.Command:
    return command
