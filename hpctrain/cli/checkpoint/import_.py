"""hpctrain checkpoint import: makes a checkpoint that a job can start from out of other programs' weights."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.base.errors import UsageError
from hpctrain.cli.checkpoint.common import PATH, Formats, files_of
from hpctrain.cli.options import example
from hpctrain.cli.progress import bytes_progress


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
    from hpctrain.checkpoint.conversion import import_weights

    format = formats.make(name)
    with files_of(path), bytes_progress("importing") as progress:
        if not path.exists():
            raise UsageError(f"there are no weights at {path}")
        count, remarks = import_weights(path, formats.all, prefix, format, out, progress)
    for remark in remarks:
        click.echo(f"{path}: {remark}")
    click.echo(f'wrote {out}: {count} tensors; start from them with [model] weights = "{out}"')
