"""hpctrain checkpoint show: what a checkpoint holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from hpctrain.cli.checkpoint.common import PATH, Formats, files_of, size_text, table


@click.command("show")
@click.argument("checkpoint", metavar="CKPT", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@click.pass_obj
def show(formats: Formats, checkpoint: Path, as_json: bool) -> None:
    """Print the step, the layout, the shards and the tensors of CKPT (a directory such as .../step-00000010)."""
    with files_of(checkpoint):
        content = _describe(formats, checkpoint)
    if as_json:
        click.echo(json.dumps(content, indent=2, default=repr))
        return
    layout = ", ".join(f"{axis} {size}" for axis, size in (content["layout"] or {}).items())
    lines = [
        ("checkpoint", content["path"]),
        ("format", content["format"]),
        ("step", content["step"]),
        ("layout", layout or "unknown"),
        ("tensors", f"{len(content['tensors'])}, {size_text(content['nbytes'])}"),
        ("shards", ", ".join(f"{one['file']} ({size_text(one['nbytes'])})" for one in content["shards"])),
        *((key, json.dumps(value, default=repr)) for key, value in content["values"].items()),
    ]
    click.echo("\n".join(f"{key:<12} {value}" for key, value in lines if key != "optimizer_numbers"))
    rows = [
        (
            name,
            one["dtype"],
            str(list(one["shape"])),
            str(len(one["chunks"])),
            ", ".join({c["file"]: 0 for c in one["chunks"]}),
        )
        for name, one in content["tensors"].items()
    ]
    click.echo("\n" + table(("TENSOR", "DTYPE", "SHAPE", "CHUNKS", "SHARDS"), rows))


def _describe(formats: Formats, path: Path) -> dict[str, Any]:
    from hpctrain.loop.metrics import finite

    found = formats.find(path)
    values, tensors = found.format.read_values(path), found.format.tensors(path)
    sizes = found.files()
    shards = dict.fromkeys(chunk.file for tensor in tensors.values() for chunk in tensor.chunks)
    return {
        "path": str(path),
        "format": found.format.name,
        "step": values.get("step"),
        "layout": values.get("layout"),
        "nbytes": sum(tensor.nbytes for tensor in tensors.values()),
        "shards": [{"file": file, "nbytes": sizes.get(file, 0)} for file in shards],
        "values": finite({key: value for key, value in values.items() if key not in ("step", "layout")}),
        "tensors": {
            name: {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": tensor.shape,
                "nbytes": tensor.nbytes,
                "chunks": [{"file": c.file, "offsets": c.offsets, "shape": c.shape} for c in tensor.chunks],
            }
            for name, tensor in tensors.items()
        },
    }
