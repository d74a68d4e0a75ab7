"""shard-00000.json: where the chunks of a shard lie, with a checksum for each of their blocks and one for all the rest.

Each rank writes the table of its own shard. The manifest has the checksum of the table, so that a table of another save
is never taken for it.
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

from ..common.collector import collector_waits
from ..common.rectangles import Rectangle
from ..common.sealed import malformed, seal, unseal
from .manifest import STRICT, Manifest, Natural

BLOCK_BYTES = 2**20
"""A checksum covers whole rows (of dim 0) of at most so many bytes, at least one row: a partial read has to read and check
whole blocks, and at its two ends half a block too much on average."""

FRAME_BYTES = 16 * 2**20
"""The most that HDF5's own structures can reasonably take in a shard, and again for each chunk."""


class RawTable(TypedDict):
    """As the file has it."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    checksum: str
    size: Natural
    xxh3: str
    chunks: dict[str, Any]


class RawChunk(TypedDict):
    """A chunk as the file has it."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    at: Natural
    xxh3: Annotated[list[str], Field(fail_fast=True)]


_TABLE = TypeAdapter(RawTable)
_CHUNKS = TypeAdapter(Annotated[list[RawChunk], Field(fail_fast=True)])


class Block(NamedTuple):
    """Consecutive rows of a chunk that share a checksum; `at` and `nbytes` say where they lie in the file."""

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
        """The byte behind it."""
        return self.at + self.part.volume * self.dtype.itemsize

    def blocks(self) -> Iterator[tuple[Block, str]]:
        """Its blocks, each with its checksum."""
        return zip(blocks(self.part, self.at, self.dtype.itemsize), self.checksums, strict=True)


@dataclass(frozen=True)
class Table:
    """`size`: of the shard, in bytes. `checksum`: over its bytes outside of all chunks, HDF5's own structures and the
    padding, which are its `holes` as (begin, end). `chunks`: in the order of the file."""

    size: int
    checksum: str
    chunks: list[Chunk]
    holes: list[tuple[int, int]]


def table_name(shard: str) -> str:
    """The file with a shard's table."""
    return str(Path(shard).with_suffix(".json"))


def blocks(part: Rectangle, at: int, itemsize: int) -> Iterator[Block]:
    """Cut a rectangle that lies from byte `at` on into the blocks that have a checksum each."""
    rows, row_bytes, step = _rows(part, itemsize)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        inner = part
        if part.shape:
            inner = Rectangle((part.offsets[0] + first, *part.offsets[1:]), (count, *part.shape[1:]))
        yield Block(inner, at + first * row_bytes, count * row_bytes)


def _rows(part: Rectangle, itemsize: int) -> tuple[int, int, int]:
    """Rows of a chunk (none if it is empty), the bytes of one, and how many make a block."""
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


def parse(raw: bytes, content: Manifest, file: int) -> Table:
    """Check the bytes of a shard's table and everything that they claim; CheckpointError says what is wrong."""
    with collector_waits():
        try:
            found = _TABLE.validate_python(unseal(raw))
            if found["checksum"] != content.shards[file].table:
                raise CheckpointError("it isn't the one that the manifest knows: it is of another save")
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


def _checked(size: int, checksum: str, chunks: list[Chunk]) -> Table:
    """The table, unless chunks lie outside of the file or in one another."""
    beyond = next((chunk for chunk in chunks if chunk.end > size), None)
    if beyond is not None:
        raise CheckpointError(f"tensor {beyond.name}: a chunk of {beyond.end - beyond.at} bytes ends beyond its file")
    spans = sorted((chunk.at, chunk.end) for chunk in chunks if chunk.part.volume)
    if any(end > begin for (_, end), (begin, _) in itertools.pairwise(spans)):
        raise CheckpointError("two chunks overlap")
    stretches = holes(spans, size)
    if sum(end - begin for begin, end in stretches) > FRAME_BYTES * (1 + len(spans)):
        raise CheckpointError(f"it declares far more bytes ({size}) than its chunks need")
    return Table(size, checksum, sorted(chunks, key=lambda one: one.at), stretches)
