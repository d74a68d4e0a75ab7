"""Options that several commands of tools share, and sizes in words."""

from __future__ import annotations

from pathlib import Path

import click

checkpoint_option = click.option(
    "--checkpoint", required=True, type=click.Path(path_type=Path), metavar="CHECKPOINT",
    help="A checkpoint's directory, .../checkpoints/latest or best, or a file of weights.",
)  # fmt: skip
weights_of_option = click.option(
    "--weights-of", metavar="HOOK",
    help="Take the weights that this hook keeps in checkpoints, such as ema, in place of the model's.",
)  # fmt: skip
load_option = click.option(
    "--load", multiple=True, metavar="MODULE",
    help="Load this module's schedulers, too; those that the run's job names are not loaded.",
)  # fmt: skip
split_option = click.option(
    "--split", type=click.Choice(["train", "validation", "test"]), default="validation", show_default=True,
    help="Of the job's dataset.",
)  # fmt: skip


def size_text(nbytes: int) -> str:
    """ "1.2 GB": decimal units, as in job files."""
    value = float(nbytes)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
