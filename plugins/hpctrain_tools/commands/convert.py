"""hpctrain convert: a job file from another library's configuration."""

from __future__ import annotations

import os
from pathlib import Path

import click

from hpctrain.toolkit.commands import UsageError, example, hookimpl, reason, say

_NAMES = {"deepspeed": "DeepSpeed", "accelerate": "Accelerate"}


@click.command(
    "convert", epilog=example("hpctrain convert deepspeed ds_config.json job.toml",
                              "hpctrain convert accelerate default_config.yaml job.toml --ranks 8"),
)  # fmt: skip
@click.argument("library", type=click.Choice(tuple(_NAMES)))
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("out", default="job.toml", type=click.Path(path_type=Path))
@click.option("--ranks", type=click.IntRange(1), help="The number of ranks (GPUs) that the configuration is for.")
def command(library: str, file: Path, out: Path, ranks: int | None) -> None:
    """Write a configuration of another library as a job file OUT (job.toml).

    A key that has no counterpart, or that is not needed, becomes a comment with the reason. Model and data, which such
    configurations leave to a program, are left to you.
    """
    from hpctrain_tools.convert.conversion import converted, one_line

    if os.path.lexists(out):
        raise UsageError(f"{out} exists already; expected a new file: give another name")
    found = converted(file, library, ranks)
    head = [
        f"{file.name} of {_NAMES[library]}, by hpctrain convert. Add [model], [dataset] and [job], here or in a job with",
        f'extends = "{out.name}".',
    ]
    text = found.text(head)
    try:
        with open(out, "x", encoding="utf-8") as written:
            written.write(text)
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {reason(error)}") from None
    without = found.keys["no counterpart"]
    say(
        f"wrote {out}: {len(found.keys['is'])} keys have a counterpart, {len(found.keys['not needed'])} are not needed, "
        f"{len(without)} have none" + (f": {one_line(', '.join(without))}" if without else "")
    )


@hookimpl
def hpctrain_command() -> click.Command:
    return command
