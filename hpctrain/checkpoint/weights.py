"""Weights to begin with, `[model] weights = PATH`: of safetensors, of torch.save, or of one of our checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.checkpoint.agreement import describe_differences
from hpctrain.checkpoint.finding import find_checkpoint, memory_for
from hpctrain.checkpoint.sources import Source, open_index, open_safetensors, open_torch
from hpctrain.contracts.checkpoint import CheckpointFormat
from hpctrain.contracts.pieces import Piece
from hpctrain.errors import CheckpointError, UsageError, reason
from hpctrain.exchange import share, together

MODEL = "model/"
"""What the names of a model's parameters begin with in our checkpoints."""
TIED = "tied"
"""The value of a checkpoint whose model has parameters of several names: those names, first the one that it lies under."""


def load_weights(
    path: Path,
    formats: Sequence[CheckpointFormat],
    pieces: list[Piece],
    group: dist.ProcessGroup,
    tied: Sequence[list[str]] = (),
) -> None:
    """Fill `pieces`, named as the model's parameters are (without "model/"); collective over `group`.

    tied: the names of each parameter that has several, first the one of its pieces. The file may have any of them.
    Together the ranks must ask for every tensor of the file. UsageError: nothing that can be read is at `path`.
    CheckpointError: names or shapes differ, or it is damaged. Values are converted to the pieces' dtypes.
    """
    try:
        if not share(group, path.exists):
            raise UsageError(f"there are no weights at {path}")
        source = together(group, lambda: open_weights(path, formats))
        share(group, source.check)
        source = _named_once(source, tied, group)
        shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
        differences = describe_differences(group, {piece.name: piece.shape for piece in pieces}, shapes)
        if differences is not None:
            raise CheckpointError(f"the weights in {path} are of another model: {differences}")
        together(group, lambda: source.fill(pieces))
    except OSError as error:
        raise CheckpointError(f"the weights in {path} can't be read: {reason(error)}") from error


def tied_names(values: Mapping[str, Any]) -> list[list[str]]:
    """What a checkpoint says under `TIED`; nothing where it says something else."""
    found = values.get(TIED, [])
    good = isinstance(found, list) and all(
        isinstance(names, list) and names and all(isinstance(name, str) and name.isprintable() for name in names)
        for names in found
    )
    return found if good else []


def _named_once(source: Source, tied: Sequence[list[str]], group: dist.ProcessGroup) -> Source:
    """`source` with a parameter of several names under the first one only; `state_dict()` has it under all.

    CheckpointError where what lies under them isn't the same.
    """
    tensors, places = dict(source.tensors), {}
    for names in tied:
        found = [name for name in names if name in tensors]
        if len(found) > 1:
            share(group, partial(_refuse_different, source, found))
        for name in found:
            tensors[names[0]], places[names[0]] = source.tensors[found[0]], found[0]
            if name != names[0]:
                del tensors[name]
    return Source(tensors, lambda pieces: source.fill([replace(p, name=places.get(p.name, p.name)) for p in pieces]))


def _refuse_different(source: Source, names: Sequence[str]) -> None:
    values = []
    for name in names:
        values.append(memory_for(name, source.tensors[name].shape, source.tensors[name].dtype))
        source.fill([Piece.whole(name, values[-1])])
        if not torch.equal(values[0], values[-1]):
            raise CheckpointError(f"{names[0]} and {name} are not the same in the weights; the model has one for both")


def open_weights(path: Path, formats: Sequence[CheckpointFormat]) -> Source:
    """The weights at `path`, named as in the model.

    Of a checkpoint that has names with "model/" (as ours have) those are taken; of one made elsewhere, all.
    """
    if not path.is_dir():
        if not path.is_file():  # opening a pipe would wait for a writer, and a device may have no end
            raise UsageError(f"{path} is no regular file, expected one with weights, or a checkpoint's directory")
        if path.name.endswith(".safetensors.index.json"):
            return open_index(path)
        return open_safetensors(path) if path.suffix == ".safetensors" else open_torch(path)
    for name in ("model.safetensors", "model.safetensors.index.json"):
        if (path / name).is_file():  # what save_pretrained() of transformers leaves
            return open_weights(path / name, formats)
    found = find_checkpoint(path, formats)
    stored = found.format.tensors(path)
    prefix = MODEL if any(name.startswith(MODEL) for name in stored) else ""
    tensors = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}

    def fill(pieces: list[Piece]) -> None:
        found.format.load(path, [replace(piece, name=prefix + piece.name) for piece in pieces])

    return Source(tensors, fill)
