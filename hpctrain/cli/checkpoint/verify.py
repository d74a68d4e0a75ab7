"""hpctrain checkpoint verify: checks that every byte is as written."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.base.errors import CheckpointError
from hpctrain.cli.checkpoint.common import CHECKPOINT, Formats, files_of, size_text
from hpctrain.cli.options import example
from hpctrain.cli.progress import bytes_progress


@click.command("verify", epilog=example("hpctrain checkpoint verify runs/gpt/checkpoints/latest"))
@click.argument("checkpoint", metavar="CKPT", type=CHECKPOINT)
@click.pass_obj
def verify(formats: Formats, checkpoint: Path) -> None:
    """Read and check all of CKPT. If it is damaged, exit 5 with the file, tensor and part of each fault."""
    with files_of(checkpoint):
        found = formats.find(checkpoint)
        with bytes_progress("verifying") as progress:
            faults = found.format.verify(checkpoint, progress)
        if faults:
            listed = "".join(f"\n  {fault}" for fault in faults)
            count = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
            raise CheckpointError(f"checkpoint {checkpoint} isn't whole: {count}{listed}")
        tensors, files = found.format.tensors(checkpoint), found.files()
    nbytes = sum(files.values())
    click.echo(f"{checkpoint}: whole, {len(tensors)} tensors, {size_text(nbytes)} in {len(files)} files")
