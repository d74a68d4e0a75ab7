"""shard-00000.json: the places of a shard's chunks, a checksum for each of their blocks, and one for all other bytes.

Each rank writes the table of its own shard. The manifest has the checksum of the table, so that a table of another save is
never mistaken for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from hpctrain.api import CheckpointError
from hpctrain.toolkit.checkpoint.rectangles import Rectangle
from hpctrain.toolkit.checkpoint.sealed import malformed, seal, unseal
from hpctrain.toolkit.checkpoint.snapshot import collector_waits

from .manifest import STRICT, Manifest, Natural

BLOCK_BYTES = 2**20
"""A checksum covers at least one whole row (of dim 0), and as many as fit this many bytes. A partial read has to read and
check whole blocks: at each of its two ends half a block too much on average."""

FRAME_BYTES = 16 * 2**20
"""The most bytes that HDF5's own structures can reasonably take in a shard, and again for each chunk."""


class RawTable(TypedDict):
    """The JSON form in the file."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    checksum: str
    size: Natural
    xxh3: str
    chunks: dict[str, Any]


class RawChunk(TypedDict):
    """The JSON form of a chunk in the file."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    at: Natural
    xxh3: Annotated[list[str], Field(fail_fast=True)]


_TABLE = TypeAdapter(RawTable)
_CHUNKS = TypeAdapter(Annotated[list[RawChunk], Field(fail_fast=True)])


class RowBlock(NamedTuple):
    """Consecutive rows of a chunk that share a checksum. `at` and `nbytes` give their place in the file."""

    part: Rectangle
    at: int
    nbytes: int


class Chunk(NamedTuple):
    """A part of a tensor, C-ordered and contiguous in a shard from byte `at` on."""

    name: str
    dtype: torch.dtype
    part: Rectangle
    at: int
    checksums: tuple[str, ...]

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.at + self.part.volume * self.dtype.itemsize

    def blocks(self) -> Iterator[tuple[RowBlock, str]]:
        """Yield the tensor's blocks, each with its checksum."""
        return zip(blocks(self.part, self.at, self.dtype.itemsize), self.checksums, strict=True)


@dataclass(frozen=True)
class ShardTable:
    """size: of the shard, in bytes. holes: its bytes outside of all chunks (HDF5's own structures and padding), as
    (begin, end). checksum: over the holes. chunks: in the order of the file."""

    size: int
    checksum: str
    chunks: list[Chunk]
    holes: list[tuple[int, int]]


def table_name(shard: str) -> str:
    """The name of the file with a shard's table."""
    return str(Path(shard).with_suffix(".json"))


def blocks(part: Rectangle, at: int, itemsize: int) -> Iterator[RowBlock]:
    """Cut a rectangle that begins at byte `at` into the blocks that each have a checksum."""
    rows, row_bytes, step = _rows(part, itemsize)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        inner = part
        if part.shape:
            inner = Rectangle((part.offsets[0] + first, *part.offsets[1:]), (count, *part.shape[1:]))
        yield RowBlock(inner, at + first * row_bytes, count * row_bytes)


def _rows(part: Rectangle, itemsize: int) -> tuple[int, int, int]:
    """The rows of a chunk (0 if it is empty), the bytes of a row, and the rows of a block."""
    if part.volume == 0:
        return 0, 0, 1
    rows = part.shape[0] if part.shape else 1
    row_bytes = part.volume * itemsize // rows
    return rows, row_bytes, max(1, BLOCK_BYTES // row_bytes)


def holes(spans: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """The (begin, end) stretches of a file of `size` bytes outside of `spans`, which must be sorted and disjoint."""
    edges = [0, *(edge for span in spans for edge in span), size]
    return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]


def dump(size: int, checksum: str, chunks: Iterable[tuple[str, int, tuple[str, ...]]]) -> bytes:
    """The bytes of a table; `chunks` are (tensor, at, checksums), in the order of the tensor's layout."""
    content: dict[str, list[dict[str, Any]]] = {}
    for name, at, checksums in chunks:
        content.setdefault(name, []).append({"at": at, "xxh3": checksums})
    return seal({"size": size, "xxh3": checksum, "chunks": content})


def parse(raw: bytes, content: Manifest, file: int) -> ShardTable:
    """Check the bytes of a shard's table and all their claims. Raises CheckpointError for any fault."""
    with collector_waits():
        try:
            found = _TABLE.validate_python(unseal(raw))
            if found["checksum"] != content.shards[file].table:
                raise CheckpointError("it isn't the table in the manifest: it belongs to another save")
            chunks = list(_chunks(found["chunks"], content, file))
            return _checked(found["size"], found["xxh3"], chunks)
        except ValidationError as error:
            raise malformed(error) from error


def _chunks(found: dict[str, Any], content: Manifest, file: int) -> Iterator[Chunk]:
    expected = 0
    for name, dtype, rectangles in content.parts_in(file):
        places = _CHUNKS.validate_python(found.get(name, []))
        if len(places) != len(rectangles):
            raise CheckpointError(f"tensor {name}: it has {len(places)} chunks here, {len(rectangles)} in the manifest")
        expected += 1
        for rectangle, place in zip(rectangles, places, strict=True):
            chunk = Chunk(name, dtype, rectangle, place["at"], tuple(place["xxh3"]))
            rows, _, step = _rows(rectangle, dtype.itemsize)
            if len(chunk.checksums) != -(-rows // step):
                raise CheckpointError(f"tensor {name}: a chunk has {len(chunk.checksums)} checksums, not one per block")
            yield chunk
    if len(found) > expected:
        raise CheckpointError(f"it has {len(found)} tensors, {expected} in the manifest")


def _checked(size: int, checksum: str, chunks: list[Chunk]) -> ShardTable:
    """The table. Raises CheckpointError if chunks lie outside of the file or overlap."""
    beyond = next((chunk for chunk in chunks if chunk.end > size), None)
    if beyond is not None:
        raise CheckpointError(f"tensor {beyond.name}: a chunk of {beyond.end - beyond.at} bytes ends beyond its file")
    spans = sorted((chunk.at, chunk.end) for chunk in chunks if chunk.part.volume)
    if any(end > begin for (_, end), (begin, _) in itertools.pairwise(spans)):
        raise CheckpointError("two chunks overlap")
    stretches = holes(spans, size)
    if sum(end - begin for begin, end in stretches) > FRAME_BYTES * (1 + len(spans)):
        raise CheckpointError(f"it declares far more bytes ({size}) than its chunks need")
    return ShardTable(size, checksum, sorted(chunks, key=lambda one: one.at), stretches)
