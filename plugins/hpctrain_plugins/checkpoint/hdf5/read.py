"""Reads any rectangles from a checkpoint, by plain reads at the positions in the tables. Each block is checked.

HDF5 itself is not used. So a crafted file can't make it follow links to other files, load filters or unpack bombs, and a
damaged structure can't hang it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from hpctrain.api import CheckpointError, Piece
from hpctrain.toolkit.checkpoint import values
from hpctrain.toolkit.checkpoint.files import empty, opened, read_file, read_into
from hpctrain.toolkit.checkpoint.rectangles import Rectangle

from . import manifest, table
from .headers import Forms
from .manifest import Manifest, SavedTensor
from .table import Chunk, RowBlock, ShardTable, table_name

STEP_BYTES = 256 * 1024
"""Bytes read at a time: few enough to be still in the core's cache when they are checked."""
MOST_KNOWN = 2
"""Cached checkpoints: `diff` reads two in turn."""
MOST_CHUNKS_KEPT = 2**20
"""The most cached chunks per checkpoint; they take about 300 MB."""


def read_manifest(directory: Path) -> Manifest:
    """The checked manifest of `directory`."""
    path = directory / manifest.FILE_NAME
    try:
        return manifest.parse(read_file(path))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def read_table(directory: Path, content: Manifest, file: int) -> ShardTable:
    """The checked table of a shard."""
    path = directory / table_name(content.shards[file].name)
    try:
        return table.parse(read_file(path), content, file)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


@dataclass
class _Known:
    """The manifest of a checkpoint as long as the file does not change, and the tables of shards whose frame was checked."""

    identity: tuple[int, int, int] | None
    manifest: Manifest
    loads: int = 0
    tables: dict[int, ShardTable] = field(default_factory=dict)


class HDF5Reader:
    """Reads checkpoints, and caches the reusable parts of the last two.

    Cached are the manifest, which a restore needs several times, and from the second load on the tables. Commands load a
    checkpoint part by part, and each part may be in all shards. A training loads once and needs the memory.
    """

    def __init__(self) -> None:
        self._known: dict[Path, _Known] = {}

    def manifest(self, directory: Path) -> Manifest:
        """The checked manifest of `directory`."""
        return self._look_up(directory).manifest

    def load(self, directory: Path, pieces: list[Piece]) -> None:
        """Fill the pieces. Raises CheckpointError with the file and the tensor of a fault."""
        known, scratch = self._look_up(directory), Scratch()
        known.loads += 1
        for file, wanted in sorted(_needs(directory, known.manifest, pieces).items()):
            kept, path = known.tables.get(file), directory / known.manifest.shards[file].name
            found = kept or read_table(directory, known.manifest, file)
            try:
                with opened(path, found.size) as fd:
                    if kept is None:
                        check_frame(fd, found)
                        self._keep(known, file, found)
                    for chunk in found.chunks:
                        for piece in wanted.get(chunk.name, ()):
                            _fill(fd, chunk, piece, scratch)
            except CheckpointError as error:
                raise CheckpointError(f"{path}: {error}") from error

    def _look_up(self, directory: Path) -> _Known:
        try:
            found = os.lstat(directory / manifest.FILE_NAME)
            identity = (found.st_ino, found.st_size, found.st_mtime_ns)
        except OSError:
            identity = None  # read_manifest reports the error
        known = self._known.pop(directory, None)
        if known is None or identity is None or known.identity != identity:
            known = _Known(identity, read_manifest(directory))
        self._known[directory] = known
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        return known

    def _keep(self, known: _Known, file: int, found: ShardTable) -> None:
        held = sum(len(one.chunks) for one in known.tables.values())
        if known.loads > 1 and held + len(found.chunks) <= MOST_CHUNKS_KEPT:
            known.tables[file] = found


class Scratch:
    """Reused memory for blocks that can't be read into place: fresh pages for each would cost as much as the reading."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> Tensor:
        """`nbytes` bytes, valid until the next call."""
        if self._memory.numel() < nbytes:
            self._memory = empty(nbytes)
        return self._memory[:nbytes]


def _needs(directory: Path, content: Manifest, pieces: list[Piece]) -> dict[int, dict[str, list[Piece]]]:
    """The pieces with elements in each shard, by tensor. Checks that the shards have all elements."""
    needs: dict[int, dict[str, list[Piece]]] = {}
    known: dict[tuple[int, Rectangle], set[int]] = {}  # most tensors and pieces are cut alike
    for piece in pieces:
        entry, target = _entry_of(directory, content, piece), _target(piece)
        files = known.get((id(entry.layout), target))
        if files is None:
            files = known[id(entry.layout), target] = _shards_with(directory, piece.name, entry, target)
        for file in files:
            needs.setdefault(file, {}).setdefault(piece.name, []).append(piece)
    return needs


def _entry_of(directory: Path, content: Manifest, piece: Piece) -> SavedTensor:
    """The tensor of a piece, after checking that the piece fits."""
    where, entry = directory / manifest.FILE_NAME, content.tensors.get(piece.name)
    if entry is None:
        raise CheckpointError(f"{where}: there is no tensor {piece.name}")
    values.check_fits(where, piece, entry.layout.shape, entry.dtype)
    return entry


def _shards_with(directory: Path, name: str, entry: SavedTensor, target: Rectangle) -> set[int]:
    """The shards with elements of `target`. Checks that together they have all of them."""
    parts = [(file, rectangle.overlap(target)) for file, rectangle in entry.layout.parts]
    found = sum(part.volume for _, part in parts if part)
    if found != target.volume:
        where = directory / manifest.FILE_NAME
        raise CheckpointError(f"{where}: tensor {name} has {found} of the {target.volume} elements asked for")
    return {file for file, part in parts if part}


def _target(piece: Piece) -> Rectangle:
    return Rectangle(tuple(piece.offsets), tuple(piece.tensor.shape))


def _fill(fd: int, chunk: Chunk, piece: Piece, scratch: Scratch) -> None:
    """Copy the chunk's share of the piece, reading only the blocks with elements of it."""
    target = _target(piece)
    if not chunk.part.overlap(target):
        return
    for block, checksum in chunk.blocks():
        part = block.part.overlap(target)
        if part is None:
            continue
        reading = BlockReading(fd, block, checksum, chunk.name)
        wanted = piece.tensor.detach()[target.slices(part)]
        direct = part == block.part and wanted.dtype == chunk.dtype and wanted.is_cpu and wanted.is_contiguous()
        # A byte other than 0 and 1 is not a valid bool; the copy converts it.
        if direct and chunk.dtype != torch.bool:
            reading.read(wanted.reshape(-1).view(torch.uint8))
        else:
            data = scratch.take(block.nbytes)
            reading.read(data)
            values = data.view(torch.uint8 if chunk.dtype == torch.bool else chunk.dtype).view(block.part.shape)
            wanted.copy_(values[block.part.slices(part)])
        reading.check()


class BlockReading:
    """Reads a block in parts. Its bytes can be trusted only after `check`."""

    def __init__(self, fd: int, block: RowBlock, checksum: str, name: str) -> None:
        self._fd, self._block, self._checksum, self._name = fd, block, checksum, name
        self._at, self._digest = block.at, xxhash.xxh3_64()

    def read(self, into: Tensor) -> None:
        """Read the next bytes into a uint8 tensor."""
        whole = into.numpy().data
        for begin in range(0, len(whole), STEP_BYTES):
            view = whole[begin : begin + STEP_BYTES]
            read_into(self._fd, view, self._at)
            self._digest.update(view)
            self._at += len(view)

    def check(self) -> None:
        """Raises CheckpointError if the bytes differ from the written ones."""
        if self._digest.hexdigest() != self._checksum:
            block = self._block
            raise CheckpointError(
                f"tensor {self._name} is corrupt: the checksum of its part {list(block.part.shape)} at "
                f"{list(block.part.offsets)} (bytes {block.at} to {block.at + block.nbytes}) is wrong"
            )


def check_frame(fd: int, found: ShardTable) -> None:
    """Check the bytes of a shard outside of all tensors, and that they describe the tensors as the manifest does."""
    digest, scratch, forms = xxhash.xxh3_64(), Scratch(), Forms()
    for begin, end in found.holes:
        for at in range(begin, end, STEP_BYTES):
            view = scratch.take(min(STEP_BYTES, end - at)).numpy().data
            read_into(fd, view, at)
            digest.update(view)
            forms.add(bytes(view), is_last=at + STEP_BYTES >= end)
    if digest.hexdigest() != found.checksum:
        raise CheckpointError("its HDF5 structure isn't the one that was written: the file is corrupt or was changed")
    forms.check(found.chunks)
