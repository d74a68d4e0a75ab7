"""manifest.json: what is where, with checksums. The only file that a reader trusts, and only after its own checksum."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
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
BLOCK_BYTES = 2**20
"""A checksum covers whole rows (of dim 0) of at most so many bytes, at least one row: a partial read has to read and check
whole blocks, and at its two ends half a block too much on average."""

FRAME_BYTES = 16 * 2**20
"""The most that HDF5's own structures can reasonably take in a shard, and again for each chunk."""

_SHARD = re.compile(r"shard-\d{5,}\.h5")


class Block(NamedTuple):
    """Consecutive rows of a chunk that share a checksum; `at` and `nbytes` say where they lie in the file."""

    part: Rectangle
    at: int
    nbytes: int


class Chunk(NamedTuple):
    """A rectangle of a tensor, C-ordered and contiguous in a shard from byte `at` on."""

    file: int
    at: int
    part: Rectangle
    checksums: tuple[str, ...]


class ShardFile(NamedTuple):
    """A shard; `checksum` is over its bytes outside of all chunks: HDF5's own structures and the padding."""

    name: str
    size: int
    checksum: str


class Entry(NamedTuple):
    """A tensor."""

    dtype: torch.dtype
    shape: Dims
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Manifest:
    """The parsed and validated content; `values` is still in its JSON form."""

    files: list[ShardFile]
    tensors: dict[str, Entry]
    values: Any
    holes: list[list[tuple[int, int]]] = field(default_factory=list)
    """Per file the (begin, end) of every stretch of bytes outside of chunks, filled by `parse`."""


def blocks(part: Rectangle, at: int, itemsize: int) -> Iterator[Block]:
    """Cut a chunk into the blocks that have a checksum each."""
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


def _block_count(part: Rectangle, itemsize: int) -> int:
    """How many blocks there are, without listing those of an absurd size."""
    rows, _, step = _rows(part, itemsize)
    return -(-rows // step)


def holes(spans: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """The (begin, end) stretches of a file of `size` bytes outside of `spans`, which must be sorted and disjoint."""
    edges = [0, *(edge for span in spans for edge in span), size]
    return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]


def dump(manifest: Manifest) -> bytes:
    """The bytes of manifest.json."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "files": [{"name": name, "size": size, "xxh3": checksum} for name, size, checksum in manifest.files],
        "tensors": {name: _entry_json(entry) for name, entry in manifest.tensors.items()},
        "values": manifest.values,
    }
    return seal(content)


def _entry_json(entry: Entry) -> dict[str, Any]:
    return {
        "dtype": dtypes.name_of(entry.dtype),
        "shape": entry.shape,
        "chunks": [
            {"file": file, "at": at, "offsets": part.offsets, "shape": part.shape, "xxh3": checksums}
            for file, at, part, checksums in entry.chunks
        ],
    }


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
        files = [ShardFile(_shard_name(one["name"]), _natural(one["size"]), one["xxh3"]) for one in content["files"]]
        tensors = {name: _entry(name, one, files) for name, one in content["tensors"].items()}
        values.decode_all(content["values"])  # so that whoever reads a manifest hears of what is wrong with them
        return Manifest(files, tensors, content["values"], _all_holes(files, tensors))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"malformed content: {type(error).__name__}: {error}") from error


def _entry(name: str, raw: dict[str, Any], files: list[ShardFile]) -> Entry:
    check_printable(name)
    dtype, shape = dtypes.by_name(raw["dtype"]), _dims(raw["shape"])
    chunks = []
    for one in raw["chunks"]:
        part = Rectangle(_dims(one["offsets"]), _dims(one["shape"]))
        chunk = Chunk(_natural(one["file"]), _natural(one["at"]), part, tuple(one["xxh3"]))
        end = chunk.at + part.volume * dtype.itemsize
        if chunk.file >= len(files) or end > files[chunk.file].size:
            raise CheckpointError(f"tensor {name}: a chunk of {end - chunk.at} bytes ends beyond its file")
        if len(chunk.checksums) != _block_count(part, dtype.itemsize):
            raise CheckpointError(f"tensor {name}: a chunk has {len(chunk.checksums)} checksums, not one per block")
        chunks.append(chunk)
    fault = tiling_fault(shape, [chunk.part for chunk in chunks])
    if fault is not None:
        raise CheckpointError(f"tensor {name}: {fault}")
    return Entry(dtype, shape, tuple(chunks))


def _all_holes(files: list[ShardFile], tensors: dict[str, Entry]) -> list[list[tuple[int, int]]]:
    spans: list[list[tuple[int, int]]] = [[] for _ in files]
    for entry in tensors.values():
        for chunk in entry.chunks:
            if chunk.part.volume:
                spans[chunk.file].append((chunk.at, chunk.at + chunk.part.volume * entry.dtype.itemsize))
    for file, mine in zip(files, spans, strict=True):
        mine.sort()
        if any(end > begin for (_, end), (begin, _) in itertools.pairwise(mine)):
            raise CheckpointError(f"two chunks overlap in {file.name}")
    found = [holes(mine, file.size) for file, mine in zip(files, spans, strict=True)]
    for file, mine, stretches in zip(files, spans, found, strict=True):
        if sum(end - begin for begin, end in stretches) > FRAME_BYTES * (1 + len(mine)):
            raise CheckpointError(f"{file.name} declares far more bytes ({file.size}) than its chunks need")
    return found


def _shard_name(name: object) -> str:
    """Only a plain file name of ours: no path that leads out of the checkpoint's directory."""
    if not isinstance(name, str) or not _SHARD.fullmatch(name):
        raise CheckpointError(f"{name!r} is no name of a shard; expected shard-00000.h5 or alike")
    return name


def _natural(number: object) -> int:
    if type(number) is not int or number < 0:
        raise CheckpointError(f"found {number!r}, expected a number that is zero or more")
    return number


def _dims(numbers: list[object]) -> Dims:
    return tuple(map(_natural, numbers))
