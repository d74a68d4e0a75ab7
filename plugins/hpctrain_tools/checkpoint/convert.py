"""hpctrain checkpoint export and import: weights as files that other programs read, and a checkpoint out of their weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from hpctrain.base.errors import UsageError
from hpctrain.cli.options import example, say
from hpctrain_tools.checkpoint.common import CHECKPOINT, PATH, Formats, bytes_progress, files_of
from hpctrain_tools.options import size_text, weights_of_option


@click.command(
    "export",
    epilog=example("hpctrain checkpoint export runs/gpt/checkpoints/best weights.safetensors --to safetensors"),
)
@click.argument("checkpoint", metavar="CKPT", type=CHECKPOINT)
@click.option(
    "--to", "kind", required=True, type=click.Choice(("safetensors", "torch", "huggingface")), help="The kind of file."
)
@click.argument("out", metavar="OUT", type=PATH)
@weights_of_option
@click.option("--merged", is_flag=True, help="With huggingface: add an adapter to the model that it adapts.")
@click.pass_obj
def export(formats: Formats, checkpoint: Path, kind: str, out: Path, weights_of: str | None, merged: bool) -> None:
    """Write the model's weights in CKPT (not the optimizer's state) to the new file OUT.

    huggingface: a directory for from_pretrained() of transformers, from the checkpoint of a model of transformers or of gpt; of an
    adapter, one that peft loads. The run's job builds the model, so run it where the job ran.
    """
    if merged and kind != "huggingface":
        raise click.UsageError("--merged goes with --to huggingface")
    if kind == "huggingface":
        from hpctrain_tools.checkpoint.pretrained import export_pretrained

        with files_of(checkpoint):
            say(f"wrote {out}: {export_pretrained(checkpoint, out, weights_of, merged)}")
        return
    from hpctrain.checkpoint.weights import open_weights
    from hpctrain_tools.checkpoint.conversion import export_safetensors, export_torch

    with files_of(checkpoint):
        found = formats.find(checkpoint)
        source = open_weights(checkpoint, formats.all, weights_of)
        with bytes_progress("exporting") as progress:
            if kind == "safetensors":  # stores values per name, so tied parameters appear under their first name only
                export_safetensors(source, out, progress)
            else:
                export_torch(source, out, progress, _tied_names(found.format.read_values(checkpoint)))
    say(f"wrote {out}: {len(source.tensors)} tensors, {size_text(out.stat().st_size)}")


@click.command("import", epilog=example("hpctrain checkpoint import weights.safetensors start"))
@click.argument("path", metavar="FILE", type=PATH)
@click.argument("out", metavar="OUT", type=PATH)
@click.option(
    "--prefix", default="", help="Take only tensors whose names begin with this prefix, and remove it from their names."
)
@click.option("--format", "name", default="hdf5", show_default=True, help="The checkpoint format of OUT.")
@click.pass_obj
def import_weights(formats: Formats, path: Path, out: Path, prefix: str, name: str) -> None:
    """Write the weights in FILE to the new checkpoint OUT, to start from with [model] weights = "OUT".

    FILE is a .safetensors file, the .safetensors.index.json of several, the directory of either, a torch.save file with a
    state dict, also inside a training program's checkpoint (no code in it is run), or the directory of a checkpoint of any
    installed format.
    """
    from hpctrain_tools.checkpoint.conversion import import_weights

    format = formats.make(name)
    with files_of(path), bytes_progress("importing") as progress:
        if not path.exists():
            raise UsageError(f"there are no weights at {path}")
        count, remarks = import_weights(path, formats.all, prefix, format, out, progress)
    for remark in remarks:
        say(f"{path}: {remark}")
    say(f'wrote {out}: {count} tensors; start from them with [model] weights = "{out}"')


def _tied_names(values: Mapping[str, Any]) -> list[list[str]]:
    """A checkpoint's value of `TIED`; empty if it is missing or malformed."""
    from hpctrain.checkpoint.state import TIED

    found = values.get(TIED, [])
    good = isinstance(found, list) and all(
        isinstance(names, list) and names and all(isinstance(name, str) and name.isprintable() for name in names)
        for names in found
    )
    return found if good else []
