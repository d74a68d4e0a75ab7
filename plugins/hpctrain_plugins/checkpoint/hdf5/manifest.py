"""manifest.json: the tensors, how they are cut, and the tables' checksums. The only file that a reader trusts by itself,
and only after its own checksum.

It is the same size however many ranks cut a tensor alike: tensors that are cut alike share a layout, and where each chunk
lies, with its checksums, stands in the table of its shard (see table.py), which is read where something of it is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from hpctrain.api import CheckpointError

from ..common import values
from ..common.collector import collector_waits
from ..common.names import check_printable
from ..common.rectangles import Dims, Rectangle, tiling_fault
from ..common.sealed import seal, unseal
from . import dtypes

FILE_NAME = "manifest.json"
FORMAT = "hpctrain-hdf5"
VERSION = 2

_SHARD = re.compile(r"shard-\d{5,}\.h5")


class Shard(NamedTuple):
    """A shard; `table` is the checksum of its table."""

    name: str
    table: str


class Part(NamedTuple):
    """A rectangle of a tensor, and the number of the shard that has it."""

    file: int
    rectangle: Rectangle


@dataclass(frozen=True)
class Layout:
    """How tensors of one shape are cut, and which shard has which part."""

    shape: Dims
    parts: tuple[Part, ...]

    @cached_property
    def by_file(self) -> dict[int, list[Rectangle]]:
        """What each shard has, in the order of the parts."""
        found: dict[int, list[Rectangle]] = {}
        for file, rectangle in self.parts:
            found.setdefault(file, []).append(rectangle)
        return found


class Entry(NamedTuple):
    """A tensor."""

    dtype: torch.dtype
    layout: Layout


@dataclass(frozen=True)
class Manifest:
    """The parsed and validated content; `values` is still in its JSON form."""

    shards: list[Shard]
    tensors: dict[str, Entry]
    values: Any

    def parts_in(self, file: int) -> Iterator[tuple[str, torch.dtype, list[Rectangle]]]:
        """The tensors of which that shard has something, with what it has."""
        for name, (dtype, layout) in self.tensors.items():
            rectangles = layout.by_file.get(file)
            if rectangles is not None:
                yield name, dtype, rectangles


def dump(manifest: Manifest) -> bytes:
    """The bytes of manifest.json."""
    layouts = {id(entry.layout): entry.layout for entry in manifest.tensors.values()}
    numbers = {known: number for number, known in enumerate(layouts)}
    content = {
        "format": FORMAT,
        "version": VERSION,
        "shards": [shard._asdict() for shard in manifest.shards],
        "layouts": [
            {
                "shape": layout.shape,
                "parts": [
                    {"shard": file, "offsets": rectangle.offsets, "shape": rectangle.shape}
                    for file, rectangle in layout.parts
                ],
            }
            for layout in layouts.values()
        ],
        "tensors": {
            name: {"dtype": dtypes.name_of(entry.dtype), "layout": numbers[id(entry.layout)]}
            for name, entry in manifest.tensors.items()
        },
        "values": manifest.values,
    }
    return seal(content)


def parse(raw: bytes) -> Manifest:
    """Check the bytes of manifest.json and everything that they claim; CheckpointError says what is wrong."""
    with collector_waits():
        return _parse(unseal(raw))


def _parse(content: Any) -> Manifest:
    try:
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            raise CheckpointError(
                f"it is {content['format']!r} version {content['version']!r}; this reader knows {FORMAT} {VERSION}"
            )
        shards = [Shard(_shard_name(one["name"]), one["table"]) for one in content["shards"]]
        if len({shard.name for shard in shards}) < len(shards):
            raise CheckpointError("it lists a shard twice")
        layouts = [_layout(one, len(shards)) for one in content["layouts"]]
        tensors = {name: _entry(name, one, layouts) for name, one in content["tensors"].items()}
        values.decode_all(content["values"])  # so that whoever reads a manifest hears of what is wrong with them
        return Manifest(shards, tensors, content["values"])
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"malformed content: {type(error).__name__}: {error}") from error


def _layout(raw: dict[str, Any], shards: int) -> Layout | str:
    """A layout, or what is wrong with it: the tensors that have it are to be named."""
    shape = _dims(raw["shape"])
    parts = tuple(
        Part(natural(one["shard"]), Rectangle(_dims(one["offsets"]), _dims(one["shape"]))) for one in raw["parts"]
    )
    unknown = [part.file for part in parts if part.file >= shards]
    if unknown:
        return f"a part is in shard {unknown[0]} of {shards}"
    return tiling_fault(shape, [part.rectangle for part in parts]) or Layout(shape, parts)


def _entry(name: str, raw: dict[str, Any], layouts: list[Layout | str]) -> Entry:
    check_printable(name)
    dtype, number = dtypes.by_name(raw["dtype"]), natural(raw["layout"])
    if number >= len(layouts):
        raise CheckpointError(f"tensor {name}: it has layout {number} of {len(layouts)}")
    layout = layouts[number]
    if isinstance(layout, str):
        raise CheckpointError(f"tensor {name}: {layout}")
    return Entry(dtype, layout)


def _shard_name(name: object) -> str:
    """Only a plain file name of ours: no path that leads out of the checkpoint's directory."""
    if not isinstance(name, str) or not _SHARD.fullmatch(name):
        raise CheckpointError(f"{name!r} is no name of a shard; expected shard-00000.h5 or alike")
    return name


def natural(number: object) -> int:
    """A number that is zero or more; CheckpointError for anything else."""
    if type(number) is not int or number < 0:
        raise CheckpointError(f"found {number!r}, expected a number that is zero or more")
    return number


def _dims(numbers: list[object]) -> Dims:
    return tuple(map(natural, numbers))
