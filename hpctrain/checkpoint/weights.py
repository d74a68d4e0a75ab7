"""Initial weights, `[model] weights = PATH`: from safetensors, torch.save, or a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from hpctrain.base.errors import CheckpointError, UsageError, reason
from hpctrain.checkpoint.directory import behind_name
from hpctrain.checkpoint.finding import describe_differences, find_checkpoint, memory_for, not_wanted
from hpctrain.checkpoint.sources import WeightsSource, open_index, open_safetensors
from hpctrain.checkpoint.state import MODEL, PLUGIN
from hpctrain.checkpoint.torch_files import open_torch
from hpctrain.contracts.checkpoint import CheckpointFormat, StoredTensor
from hpctrain.contracts.pieces import Piece
from hpctrain.ranks.json_collectives import gather_values, share, sum_of, together


class OtherModelError(CheckpointError):
    """Names or shapes are not those of the model."""


def load_weights(
    path: Path,
    formats: Sequence[CheckpointFormat],
    pieces: list[Piece],
    group: dist.ProcessGroup,
    tied: Sequence[list[str]] = (),
    kept_by: str | None = None,
    strict: bool = True,
    reads: bool = True,
) -> list[str]:
    """Fill `pieces`, which have the names of the model's parameters (without "model/"); collective over `group`.

    tied: the names of each tied parameter, the name of its pieces first. The file may have any of them. A prefix that all names
    of the file have, such as "module.", is left out if the model's names lack it. kept_by: see `open_weights`. strict: together
    the ranks must ask for every tensor of the file, and it must have each of theirs; else only those of both are filled. Values
    are converted to the pieces' dtypes. reads: else only names and shapes are compared.

    Returns what a user should know: where the tensors were found, which were left. Raises UsageError if there are no weights at
    `path`, and CheckpointError if names or shapes differ or the file is damaged.
    """
    try:
        if not share(group, path.exists):
            raise UsageError(
                f"there are no weights at {path}; expected a path (names of the Hugging Face hub are not taken)"
            )
        source = together(group, lambda: open_weights(path, formats, kept_by))
        if reads:
            share(group, source.check)
        shapes = {piece.name: piece.shape for piece in pieces}
        source = _fitting(_named_once(source, tied, group), shapes, tied, group)
        differences = describe_differences(group, shapes, _shapes(source))
        left: list[str] = []
        if differences is not None:
            if strict:
                raise OtherModelError(f"the weights in {path} are of another model: {differences}")
            pieces, left = _in_both(path, source, pieces, group)
        if reads:
            together(group, lambda: source.fill(pieces))
        return [*source.remarks, *left]
    except OSError as error:
        raise CheckpointError(f"the weights in {path} can't be read: {reason(error)}") from error


def _shapes(source: WeightsSource) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in source.tensors.items()}


def _fitting(
    source: WeightsSource, wanted: dict[str, tuple[int, ...]], tied: Sequence[list[str]], group: dist.ProcessGroup
) -> WeightsSource:
    """`source`, without a prefix that all its names have if only then the model's tensors are in it. Collective."""
    known, found = {*wanted, *(name for names in tied for name in names)}, source
    while not sum_of(int(any(name in found.tensors for name in known)), group):
        first = next(iter(found.tensors), "").partition(".")[0] + "."
        if not found.tensors or not all(name.startswith(first) for name in found.tensors):
            return source
        names = {name.removeprefix(first): name for name in found.tensors}
        found = _named_once(found.renamed(names, f"all its names begin with {first!r}, which is left out"), tied, group)
    return found


def _in_both(
    path: Path, source: WeightsSource, pieces: list[Piece], group: dist.ProcessGroup
) -> tuple[list[Piece], list[str]]:
    """The pieces that the file has a tensor for, and what is left of the model and of the file. Collective."""
    shapes = _shapes(source)
    chosen = [piece for piece in pieces if shapes.get(piece.name) == piece.shape]
    mine = {piece.name for piece in chosen}
    unused = not_wanted(group, mine, shapes)
    if len(unused) == len(shapes):
        raise CheckpointError(f"the weights in {path} have no tensor of the model: {', '.join(unused[:3])}")
    lacking = sorted({piece.name for piece in pieces} - mine)
    missing = sorted({name for names in gather_values(lacking, group) for name in names})
    told = []
    if missing:
        told.append(f"not in it or of another shape, so they keep their first values: {', '.join(missing)}")
    if unused:
        told.append(f"of no use to the model: {', '.join(unused)}")
    return chosen, told


def _named_once(source: WeightsSource, tied: Sequence[list[str]], group: dist.ProcessGroup) -> WeightsSource:
    """`source` with each tied parameter under its first name only; a `state_dict()` has it under all names.

    CheckpointError if the values under these names differ.
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

    def fill(pieces: list[Piece]) -> None:
        source.fill([replace(piece, name=places.get(piece.name, piece.name)) for piece in pieces])

    return WeightsSource(tensors, fill, source.check, source.remarks)


def _refuse_different(source: WeightsSource, names: Sequence[str]) -> None:
    values = []
    for name in names:
        values.append(memory_for(name, source.tensors[name].shape, source.tensors[name].dtype))
        source.fill([Piece.whole(name, values[-1])])
        if not torch.equal(values[0], values[-1]):
            raise CheckpointError(
                f"{names[0]} and {name} differ in the weights, but the model ties them to one parameter"
            )


def open_weights(path: Path, formats: Sequence[CheckpointFormat], kept_by: str | None = None) -> WeightsSource:
    """The weights at `path`, named as in the model.

    From a checkpoint with names that begin with "model/", as hpctrain's do, only those are taken; from any other, all.
    kept_by: the name of a plugin, such as "ema", that keeps values of its own for parameters in its checkpoints. They are taken in
    place of the model's; UsageError if there are none. A file `latest` or `best` stands for the checkpoint that it names.
    """
    path = behind_name(path)
    if not path.is_dir():
        if kept_by is not None:
            raise UsageError(f"{path} is a file with one set of weights; only checkpoints have those of {kept_by!r}")
        if not path.is_file():  # opening a pipe would wait for a writer, and a device may have no end
            raise UsageError(f"{path} is no regular file; expected a file of weights or a checkpoint's directory")
        if path.name.endswith(".safetensors.index.json"):
            return open_index(path)
        return open_safetensors(path) if path.suffix == ".safetensors" else open_torch(path)
    for name in ("model.safetensors", "model.safetensors.index.json"):
        if (path / name).is_file():  # written by save_pretrained() of transformers
            return open_weights(path / name, formats, kept_by)
    found = find_checkpoint(path, formats)
    stored = found.format.tensors(path)
    prefix = MODEL if any(name.startswith(MODEL) for name in stored) else ""
    places = {name.removeprefix(prefix): name for name in stored if name.startswith(prefix)}
    if kept_by is not None:
        places |= _kept(path, places, stored, kept_by)

    def fill(pieces: list[Piece]) -> None:
        found.format.load(path, [replace(piece, name=places[piece.name]) for piece in pieces])

    return WeightsSource({name: stored[place] for name, place in places.items()}, fill)


def _kept(path: Path, places: Mapping[str, str], stored: Mapping[str, StoredTensor], kept_by: str) -> dict[str, str]:
    """The stored names of a plugin's values for parameters."""

    def of(plugin: str) -> dict[str, str]:
        names = {name: f"{PLUGIN}{plugin}/{name}" for name in places}
        return {
            name: place
            for name, place in names.items()
            if place in stored and stored[place].shape == stored[places[name]].shape
        }

    kept = of(kept_by)
    if not kept:
        plugins = sorted({name.split("/")[1] for name in stored if name.startswith(PLUGIN)})
        having = [repr(plugin) for plugin in plugins if of(plugin)]
        raise UsageError(
            f"{path} has no weights of {kept_by!r}; it has the model's"
            + "".join(f" and those of {one}" for one in having)
        )
    return kept
