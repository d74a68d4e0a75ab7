"""hpctrain new: writes a commented job file to start from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import click

from hpctrain.errors import UsageError

TEMPLATES = ("gpt", "module", "finetune")


@click.command("new")
@click.argument("path", default="job.toml", type=click.Path(path_type=Path))
@click.option("--template", default="gpt", type=click.Choice(TEMPLATES), show_default=True, help="Train a GPT from scratch, "
              "a torch.nn.Module of your own, or from given weights.")  # fmt: skip
def command(path: Path, template: str) -> None:
    """Write a commented job file to PATH (job.toml). An existing file stays as it is."""
    text = (files("hpctrain.cli") / "templates" / f"{template}.toml").read_text(encoding="utf-8")
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists already; expected a new file: give another name") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    click.echo(f"wrote {path}; edit it, then: hpctrain check {path} && hpctrain run {path}")
