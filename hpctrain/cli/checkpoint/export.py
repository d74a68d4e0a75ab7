"""hpctrain checkpoint export: a model's weights as a file that other programs read."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.checkpoint.common import CHECKPOINT, PATH, Formats, files_of, size_text
from hpctrain.cli.progress import bytes_progress


@click.command("export")
@click.argument("checkpoint", metavar="CKPT", type=CHECKPOINT)
@click.option("--to", "kind", required=True, type=click.Choice(("safetensors", "torch")), help="The kind of file.")
@click.argument("out", metavar="OUT", type=PATH)
@click.pass_obj
def export(formats: Formats, checkpoint: Path, kind: str, out: Path) -> None:
    """Write the model's weights in CKPT (not the optimizer's state) to the new file OUT."""
    from hpctrain.checkpoint.conversion import export_safetensors, export_torch
    from hpctrain.checkpoint.weights import open_weights, tied_names

    with files_of(checkpoint):
        found = formats.find(checkpoint)
        source = open_weights(checkpoint, formats.all)
        with bytes_progress("exporting") as progress:
            if (
                kind == "safetensors"
            ):  # where each name has values of its own, so the first one of tied parameters stands alone
                export_safetensors(source, out, progress)
            else:
                export_torch(source, out, progress, tied_names(found.format.read_values(checkpoint)))
    click.echo(f"wrote {out}: {len(source.tensors)} tensors, {size_text(out.stat().st_size)}")
