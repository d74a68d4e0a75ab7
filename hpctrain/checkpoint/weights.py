"""Weights to begin with, `[model] weights = PATH`: of safetensors, of torch.save, or of one of our checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from hpctrain.checkpoint.agreement import describe_differences, share, together
from hpctrain.checkpoint.finding import find_checkpoint
from hpctrain.checkpoint.sources import Source, open_safetensors, open_torch
from hpctrain.contracts.checkpoint import CheckpointFormat
from hpctrain.contracts.pieces import Piece
from hpctrain.errors import CheckpointError, UsageError

MODEL = "model/"
"""What the names of a model's parameters begin with in our checkpoints."""


def load_weights(
    path: Path, formats: Sequence[CheckpointFormat], pieces: list[Piece], group: dist.ProcessGroup
) -> None:
    """Fill `pieces`, named as the model's parameters are (without "model/"); collective over `group`.

    Together the ranks must ask for every tensor of the file. UsageError: nothing that can be read is at `path`.
    CheckpointError: names or shapes differ, or it is damaged. Values are converted to the pieces' dtypes.
    """
    if not share(group, path.exists):
        raise UsageError(f"there are no weights at {path}")
    source = together(group, lambda: open_weights(path, formats))
    share(group, source.check)
    shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
    differences = describe_differences(group, {piece.name: piece.shape for piece in pieces}, shapes)
    if differences is not None:
        raise CheckpointError(f"the weights in {path} are of another model: {differences}")
    together(group, lambda: source.fill(pieces))


def open_weights(path: Path, formats: Sequence[CheckpointFormat]) -> Source:
    """The weights at `path`, named as in the model.

    Of a checkpoint that has names with "model/" (as ours have) those are taken; of one made elsewhere, all.
    """
    if not path.is_dir():
        if not path.is_file():  # opening a pipe would wait for a writer, and a device may have no end
            raise UsageError(f"{path} is no regular file, expected one with weights, or a checkpoint's directory")
        return open_safetensors(path) if path.suffix == ".safetensors" else open_torch(path)
    found = find_checkpoint(path, formats)
    stored = found.format.tensors(path)
    prefix = MODEL if any(name.startswith(MODEL) for name in stored) else ""
    tensors = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}

    def fill(pieces: list[Piece]) -> None:
        found.format.load(path, [replace(piece, name=prefix + piece.name) for piece in pieces])

    return Source(tensors, fill)
