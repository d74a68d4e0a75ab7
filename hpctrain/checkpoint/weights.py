"""Initial weights, `[model] weights = PATH`: from safetensors, torch.save, or a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.errors import CheckpointError, UsageError, reason
from hpctrain.checkpoint.directory import behind_name
from hpctrain.checkpoint.finding import describe_differences, format_of, memory_for, not_wanted
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
    of the file have, such as "module.", is left out if the model's names lack it. kept_by: see `open_weights`. strict: the file
    must have exactly the tensors that the ranks together ask for; else those that both have are filled. Values are converted to
    the pieces' dtypes. reads: false compares names and shapes only.

    Returns remarks for the user: where the tensors were found, which were left. Raises UsageError if there are no weights at
    `path`, and CheckpointError if names or shapes differ or the file is damaged.
    """
    try:
        if not share(group, path.exists):
            raise UsageError(
                f"there are no weights at {path}; expected a path (names of the Hugging Face hub are not taken)"
            )
        source = together(group, lambda: open_weights(path, formats, kept_by))
        if reads:
            share(group, source.check)  # on rank 0 alone: it reads the whole file
        shapes = {piece.name: piece.shape for piece in pieces}
        source = _fitting(_named_once(source, tied, group), shapes, tied, group)
        differences = describe_differences(group, shapes, _shapes(source))
        remarks = [*source.remarks]
        if differences is not None:
            if strict:
                raise OtherModelError(f"the weights in {path} are of another model: {differences}")
            pieces, further = _in_both(path, source, pieces, group)
            remarks += further
        if reads:
            together(group, lambda: source.fill(pieces))
        return remarks
    except OSError as error:
        raise CheckpointError(f"the weights in {path} can't be read: {reason(error)}") from error


def _shapes(source: WeightsSource) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in source.tensors.items()}


def _fitting(
    source: WeightsSource, shapes: dict[str, tuple[int, ...]], tied: Sequence[list[str]], group: dist.ProcessGroup
) -> WeightsSource:
    """`source` without the prefixes that all its names have, if only then it has a tensor of the model. Collective."""
    names, stripped = {*shapes, *(name for tie in tied for name in tie)}, source
    # over all ranks: a pipeline's ask for different names
    while not sum_of(int(any(name in stripped.tensors for name in names)), group):
        first = next(iter(stripped.tensors), "").partition(".")[0] + "."
        if not stripped.tensors or not all(name.startswith(first) for name in stripped.tensors):
            return source
        stored = {name.removeprefix(first): name for name in stripped.tensors}
        remark = f"all its names begin with {first!r}, which is left out"
        stripped = _named_once(stripped.renamed(stored, remark), tied, group)
    return stripped


def _in_both(
    path: Path, source: WeightsSource, pieces: list[Piece], group: dist.ProcessGroup
) -> tuple[list[Piece], list[str]]:
    """The pieces that the file has a tensor for, and remarks about the other tensors of the model and of the file. Collective."""
    shapes = _shapes(source)
    chosen = [piece for piece in pieces if shapes.get(piece.name) == piece.shape]
    held = {piece.name for piece in chosen}
    unused = not_wanted(group, held, shapes)
    if len(unused) == len(shapes):
        raise CheckpointError(f"the weights in {path} have no tensor of the model: {', '.join(unused[:3])}")
    lacking = sorted({piece.name for piece in pieces} - held)
    missing = sorted({name for names in gather_values(lacking, group) for name in names})
    remarks = []
    if missing:
        remarks.append(f"not in it or of another shape, so they keep their first values: {', '.join(missing)}")
    if unused:
        remarks.append(f"of no use to the model: {', '.join(unused)}")
    return chosen, remarks


def _named_once(source: WeightsSource, tied: Sequence[list[str]], group: dist.ProcessGroup) -> WeightsSource:
    """`source` with each tied parameter under its first name only; a `state_dict()` has it under all names. Collective.

    CheckpointError if the values under these names differ.
    """
    places = {name: name for name in source.tensors}
    for names in tied:
        stored = [name for name in names if name in places]
        if len(stored) > 1:
            share(group, partial(_refuse_different, source, stored))
        for name in stored:
            del places[name]
        if stored:
            places[names[0]] = stored[0]
    return source.renamed(places)


def _refuse_different(source: WeightsSource, names: Sequence[str]) -> None:
    """Raise CheckpointError if the values under several names of one parameter differ."""

    def values_of(name: str) -> Tensor:
        values = memory_for(name, source.tensors[name].shape, source.tensors[name].dtype)
        source.fill([Piece.whole(name, values)])
        return values

    first = values_of(names[0])
    for name in names[1:]:
        if not torch.equal(first, values_of(name)):
            raise CheckpointError(
                f"{names[0]} and {name} differ in the weights, but the model ties them to one parameter"
            )


def open_weights(path: Path, formats: Sequence[CheckpointFormat], kept_by: str | None = None) -> WeightsSource:
    """The weights at `path`, named as in the model.

    From a checkpoint with names that begin with "model/", as hpctrain's do, only those are taken; from any other, all.
    kept_by: the name of a plugin, such as "ema", whose own values of parameters in the checkpoint are taken in place of the
    model's; UsageError if there are none. A file `latest` or `best` stands for the checkpoint that it names.
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
    format = format_of(path, formats)
    stored = format.tensors(path)
    prefix = MODEL if any(name.startswith(MODEL) for name in stored) else ""
    places = {name.removeprefix(prefix): name for name in stored if name.startswith(prefix)}
    if kept_by is not None:
        places |= _kept(path, places, stored, kept_by)
    # no check: `load` checks what it reads
    return WeightsSource(stored, partial(format.load, path)).renamed(places)


def _kept(path: Path, places: Mapping[str, str], stored: Mapping[str, StoredTensor], kept_by: str) -> dict[str, str]:
    """The stored names of a plugin's values of parameters. UsageError if it has none."""

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
        others = "".join(f" and those of {plugin!r}" for plugin in plugins if of(plugin))
        raise UsageError(f"{path} has no weights of {kept_by!r}; it has the model's{others}")
    return kept
