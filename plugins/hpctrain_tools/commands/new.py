"""hpctrain new: writes a commented job file to start from."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

import click

from hpctrain.base.errors import UsageError
from hpctrain.cli.options import example, say
from hpctrain.toolkit.commands import hookimpl

TEMPLATES = ("gpt", "module", "finetune")
# the module that a template's job names; it goes beside the job
_PROGRAMS = {"finetune": "finetune.py"}


@click.command("new", epilog=example("hpctrain new job.toml", "hpctrain new --template finetune my.toml"))
@click.argument("path", default="job.toml", type=click.Path(path_type=Path))
@click.option("--template", default="gpt", type=click.Choice(TEMPLATES), show_default=True, help="Train a GPT from scratch or "
              "a torch.nn.Module of your own, or fine-tune a model of transformers.")  # fmt: skip
def command(path: Path, template: str) -> None:
    """Write a commented job file to PATH (job.toml), and for `finetune` the Python that it needs. Existing files stay."""
    written = {path: f"{template}.toml"}
    if template in _PROGRAMS:
        written[path.parent / _PROGRAMS[template]] = _PROGRAMS[template]
    for target in written:
        if os.path.lexists(target):
            raise UsageError(
                f"{target} exists already; expected a new file: give another name, in another directory perhaps"
            )
    for target, name in written.items():
        text = (files("hpctrain_tools") / "templates" / name).read_text(encoding="utf-8")
        try:
            with open(target, "x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise UsageError(f"{target} cannot be written: {error.strerror}") from None
    told = " and ".join(map(str, written))
    say(f"wrote {told}; edit {path}, then: hpctrain check {path} && hpctrain run {path}")


@hookimpl
def hpctrain_command() -> click.Command:
    return command
