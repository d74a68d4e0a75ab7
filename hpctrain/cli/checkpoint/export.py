"""hpctrain checkpoint export: a model's weights as a file that other programs read."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.checkpoint.common import CHECKPOINT, PATH, Formats, files_of, size_text
from hpctrain.cli.options import example, weights_of_option
from hpctrain.cli.progress import bytes_progress


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
@click.pass_obj
def export(formats: Formats, checkpoint: Path, kind: str, out: Path, weights_of: str | None) -> None:
    """Write the model's weights in CKPT (not the optimizer's state) to the new file OUT.

    huggingface: a directory for from_pretrained(), from the checkpoint of a run that trains a model of transformers. The run's job
    builds the model, so run it where the job ran.
    """
    if kind == "huggingface":
        from hpctrain.training.inference import export_pretrained

        with files_of(checkpoint):
            click.echo(f"wrote {out}: {export_pretrained(checkpoint, out, weights_of)}")
        return
    from hpctrain.checkpoint.conversion import export_safetensors, export_torch
    from hpctrain.checkpoint.weights import open_weights, tied_names

    with files_of(checkpoint):
        found = formats.find(checkpoint)
        source = open_weights(checkpoint, formats.all, weights_of)
        with bytes_progress("exporting") as progress:
            if kind == "safetensors":  # stores values per name, so tied parameters appear under their first name only
                export_safetensors(source, out, progress)
            else:
                export_torch(source, out, progress, tied_names(found.format.read_values(checkpoint)))
    click.echo(f"wrote {out}: {len(source.tensors)} tensors, {size_text(out.stat().st_size)}")
