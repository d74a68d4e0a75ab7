"""hpctrain checkpoint show: prints the content of a checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click

from hpctrain.cli.options import example, say
from hpctrain_tools.checkpoint.common import CHECKPOINT, Formats, files_of, sizes_of_files, table
from hpctrain_tools.options import size_text


@click.command("show", epilog=example("hpctrain checkpoint show runs/gpt/checkpoints/latest"))
@click.argument("checkpoint", metavar="CKPT", type=CHECKPOINT)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@click.pass_obj
def show(formats: Formats, checkpoint: Path, as_json: bool) -> None:
    """Print the step, the layout, the shards and the tensors of CKPT (a directory such as .../step-00000010)."""
    with files_of(checkpoint):
        content = _describe(formats, checkpoint)
    if as_json:
        say(json.dumps(content, indent=2))
        return
    layout = content["layout"]
    axes = [f"{axis} {size}" for axis, size in layout.items()] if isinstance(layout, dict) else []
    lines = [
        ("checkpoint", content["path"]),
        ("format", content["format"]),
        ("step", content["step"]),
        ("layout", ", ".join(axes) or "unknown"),
        ("tensors", f"{len(content['tensors'])}, {size_text(content['nbytes'])}"),
        (
            "shards",
            ", ".join(
                f"{one['file']} ({'missing' if one['nbytes'] is None else size_text(one['nbytes'])})"
                for one in content["shards"]
            ),
        ),
        *((key, json.dumps(value)) for key, value in content["values"].items()),
    ]
    say("\n".join(f"{key:<12} {value}" for key, value in lines if key != "optimizer_numbers"))
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
    say("\n" + table(("TENSOR", "DTYPE", "SHAPE", "CHUNKS", "SHARDS"), rows))


def _describe(formats: Formats, path: Path) -> dict[str, Any]:
    found = formats.find(path)
    values, tensors = _as_json(found.format.read_values(path)), found.format.tensors(path)
    sizes = sizes_of_files(path)
    shards = dict.fromkeys(chunk.file for tensor in tensors.values() for chunk in tensor.chunks)
    return {
        "path": str(path),
        "format": found.format.name,
        "step": values.get("step"),
        "layout": values.get("layout"),
        "nbytes": sum(tensor.nbytes for tensor in tensors.values()),
        "shards": [{"file": file, "nbytes": sizes.get(file)} for file in shards],
        "values": {key: value for key, value in values.items() if key not in ("step", "layout")},
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


def _as_json(value: Any) -> Any:
    """`value` for JSON: keys become text, numbers that aren't finite become null, and other objects become their repr."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else repr(key): _as_json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else repr(value)
