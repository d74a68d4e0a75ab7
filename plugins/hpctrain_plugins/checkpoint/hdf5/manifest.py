"""manifest.json: the tensors, their layouts, and the checksums of the tables. A reader trusts this file first, after
checking its own checksum.

Its size does not grow with the ranks that cut a tensor alike, because tensors that are cut alike share a layout. The place
and the checksums of each chunk are in the table of its shard (see table.py), which is read only if needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from hpctrain.api import CheckpointError, shown
from hpctrain.toolkit.checkpoint import values
from hpctrain.toolkit.checkpoint.rectangles import Dims, Rectangle, tiling_fault
from hpctrain.toolkit.checkpoint.sealed import malformed, seal, unseal
from hpctrain.toolkit.checkpoint.snapshot import collector_waits

from . import dtypes

FILE_NAME = "manifest.json"
FORMAT = "hpctrain-hdf5"
VERSION = 2

_SHARD = re.compile(r"shard-[0-9]{5,12}\.h5")
_MOST_DIMS = 32  # HDF5's H5S_MAX_RANK
STRICT = ConfigDict(strict=True)
Natural = Annotated[int, Field(ge=0, lt=2**63)]
Lengths = Annotated[list[Natural], Field(max_length=_MOST_DIMS, fail_fast=True)]


class RawShard(TypedDict):
    """The JSON form in the file, as are the other Raw classes."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    name: str
    table: str


class RawPart(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    shard: Natural
    offsets: Lengths
    shape: Lengths


class RawLayout(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    shape: Lengths
    parts: Annotated[list[RawPart], Field(fail_fast=True)]


class RawTensor(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    dtype: str
    layout: Natural


class RawManifest(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    shards: Annotated[list[RawShard], Field(fail_fast=True)]
    layouts: Annotated[list[RawLayout], Field(fail_fast=True)]
    tensors: dict[str, Any]
    values: Any


_MANIFEST = TypeAdapter(RawManifest)
_TENSORS = TypeAdapter(Annotated[list[RawTensor], Field(fail_fast=True)])


class Shard(NamedTuple):
    """A shard; `table` is the checksum of its table."""

    name: str
    table: str


class ShardPart(NamedTuple):
    """A rectangle of a tensor, and the number of its shard."""

    file: int
    rectangle: Rectangle


@dataclass(frozen=True)
class ShardMap:
    """The layout of tensors of one shape: their parts, and the shard of each part."""

    shape: Dims
    parts: tuple[ShardPart, ...]

    @cached_property
    def by_file(self) -> dict[int, list[Rectangle]]:
        """The parts of each shard, in the order of the parts."""
        found: dict[int, list[Rectangle]] = {}
        for file, rectangle in self.parts:
            found.setdefault(file, []).append(rectangle)
        return found


class SavedTensor(NamedTuple):
    """A tensor."""

    dtype: torch.dtype
    layout: ShardMap


@dataclass(frozen=True)
class Manifest:
    """The parsed and validated content; `values` is still in its JSON form."""

    shards: list[Shard]
    tensors: dict[str, SavedTensor]
    values: Any

    def parts_in(self, file: int) -> Iterator[tuple[str, torch.dtype, list[Rectangle]]]:
        """The tensors with parts in that shard, and these parts."""
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
    """Check the bytes of manifest.json and all their claims. Raises CheckpointError for any fault."""
    with collector_waits():
        return _parse(unseal(raw))


def _parse(content: Any) -> Manifest:
    found = (content.get("format"), content.get("version"))
    if found != (FORMAT, VERSION):
        raise CheckpointError(
            f"it is {shown(found[0])} version {shown(found[1])}; this reader knows {FORMAT} {VERSION}"
        )
    try:
        raw = _MANIFEST.validate_python(content)
        entries = dict(zip(raw["tensors"], _TENSORS.validate_python([*raw["tensors"].values()]), strict=True))
    except ValidationError as error:
        raise malformed(error) from error
    shards = [Shard(_shard_name(one["name"]), one["table"]) for one in raw["shards"]]
    if len({shard.name for shard in shards}) < len(shards):
        raise CheckpointError("it lists a shard twice")
    layouts: dict[int, ShardMap] = {}
    tensors = {}
    for name, one in entries.items():
        values.check_printable(name)
        number = one["layout"]
        if number >= len(raw["layouts"]):
            raise CheckpointError(f"tensor {name}: it has layout {number} of {len(raw['layouts'])}")
        try:
            if number not in layouts:
                layouts[number] = _layout(raw["layouts"][number], len(shards))
            tensors[name] = _entry(one["dtype"], layouts[number])
        except CheckpointError as error:
            raise CheckpointError(f"tensor {name}: {error}") from error
    if len(layouts) < len(raw["layouts"]):
        raise CheckpointError(f"it has {len(raw['layouts'])} layouts, and tensors of {len(layouts)} of them")
    values.decode_all(raw["values"])  # so that every reader of a manifest finds faults in the values
    return Manifest(shards, tensors, raw["values"])


def _layout(raw: RawLayout, shards: int) -> ShardMap:
    shape = tuple(raw["shape"])
    parts = tuple(
        ShardPart(one["shard"], Rectangle(tuple(one["offsets"]), tuple(one["shape"]))) for one in raw["parts"]
    )
    unknown = next((part.file for part in parts if part.file >= shards), None)
    if unknown is not None:
        raise CheckpointError(f"a part is in shard {unknown} of {shards}")
    fault = tiling_fault(shape, [part.rectangle for part in parts])
    if fault is not None:
        raise CheckpointError(fault)
    return ShardMap(shape, parts)


def _entry(name: str, layout: ShardMap) -> SavedTensor:
    dtype = dtypes.by_name(name)
    if math.prod(layout.shape) * dtype.itemsize >= 2**63:
        raise CheckpointError(f"{list(layout.shape)} values of {name} are more than a file can hold")
    return SavedTensor(dtype, layout)


def _shard_name(name: str) -> str:
    """Accept only shard names of this format, so that no path leads out of the checkpoint's directory."""
    if not _SHARD.fullmatch(name):
        raise CheckpointError(f"{shown(name)} is not the name of a shard; expected a name like shard-00000.h5")
    return name
