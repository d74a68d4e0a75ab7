"""Reading: any rectangles from a checkpoint, by plain reads at the manifest's positions, each block checked.

HDF5 itself takes no part in it: what a crafted file makes HDF5 do (follow links to other files, load filters, unpack
bombs) can't happen, and a damaged structure can't hang it.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from hpctrain.api import CheckpointError, Piece

from ..common.files import empty, opened, read_at, read_into
from ..common.fitting import check_fits
from ..common.rectangles import Rectangle
from . import manifest
from .manifest import Block, Chunk, Manifest

STEP_BYTES = 256 * 1024
"""Read at a time: so many bytes are still in a core's cache when they are checked."""


class Need(NamedTuple):
    """A chunk that a piece needs some of."""

    chunk: Chunk
    piece: Piece


def read_manifest(directory: Path) -> Manifest:
    """The checked manifest of `directory`."""
    path = directory / manifest.FILE_NAME
    try:
        with opened(path) as fd:
            return manifest.parse(read_at(fd, os.fstat(fd).st_size, 0).numpy().tobytes())
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


class ManifestReader:
    """Reads manifests, and remembers the last one while its file stays the same: a restore asks several times."""

    def __init__(self) -> None:
        self._known: tuple[Path, tuple[int, int, int], Manifest] | None = None

    def __call__(self, directory: Path) -> Manifest:
        """The checked manifest of `directory`."""
        try:
            found = os.lstat(directory / manifest.FILE_NAME)
        except OSError:
            return read_manifest(directory)  # which says it in a sentence
        identity = (found.st_ino, found.st_size, found.st_mtime_ns)
        if self._known is None or self._known[:2] != (directory, identity):
            self._known = (directory, identity, read_manifest(directory))
        return self._known[2]


class Scratch:
    """Memory for blocks that aren't read to where they belong: fresh pages for each would cost as much as the reading."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> Tensor:
        """`nbytes` bytes that the next call takes back."""
        if self._memory.numel() < nbytes:
            self._memory = empty(nbytes)
        return self._memory[:nbytes]


def load(directory: Path, content: Manifest, pieces: list[Piece]) -> None:
    """Fill the pieces; CheckpointError names the file and the tensor of whatever is wrong."""
    needs: dict[int, list[Need]] = defaultdict(list)
    for piece in pieces:
        for chunk in _chunks_for(directory, content, piece):
            needs[chunk.file].append(Need(chunk, piece))
    scratch = Scratch()
    for index, wanted in sorted(needs.items()):
        file = content.files[index]
        try:
            with opened(directory / file.name, file.size) as fd:
                check_frame(fd, content, index)
                for need in sorted(wanted, key=lambda one: one.chunk.at):  # in the order of the file
                    _fill(fd, need, content.tensors[need.piece.name].dtype, scratch)
        except CheckpointError as error:
            raise CheckpointError(f"{directory / file.name}: {error}") from error


def _chunks_for(directory: Path, content: Manifest, piece: Piece) -> list[Chunk]:
    """The chunks that overlap a piece, after checking that together they fill it."""
    where = directory / manifest.FILE_NAME
    entry = content.tensors.get(piece.name)
    if entry is None:
        raise CheckpointError(f"{where}: there is no tensor {piece.name}")
    check_fits(where, piece, entry.shape, entry.dtype)
    target = Rectangle(tuple(piece.offsets), tuple(piece.tensor.shape))
    parts = [(chunk, chunk.part.overlap(target)) for chunk in entry.chunks]
    found = sum(part.volume for _, part in parts if part)
    if found != target.volume:
        raise CheckpointError(f"{where}: tensor {piece.name} has {found} of the {target.volume} elements asked for")
    return [chunk for chunk, part in parts if part]


def _fill(fd: int, need: Need, dtype: torch.dtype, scratch: Scratch) -> None:
    """Copy what the chunk has of the piece, reading the blocks that hold some of it."""
    target = Rectangle(tuple(need.piece.offsets), tuple(need.piece.tensor.shape))
    for number, block in enumerate(manifest.blocks(need.chunk.part, need.chunk.at, dtype.itemsize)):
        part = block.part.overlap(target)
        if part is None:
            continue
        reading = BlockReading(fd, block, need.chunk.checksums[number], need.piece.name)
        wanted = need.piece.tensor.detach()[target.slices(part)]
        direct = part == block.part and wanted.dtype == dtype and wanted.is_cpu and wanted.is_contiguous()
        # A byte other than 0 and 1 is no bool: then the copy converts it.
        if direct and dtype != torch.bool:
            reading.read(wanted.reshape(-1).view(torch.uint8))
        else:
            data = scratch.take(block.nbytes)
            reading.read(data)
            values = data.view(torch.uint8 if dtype == torch.bool else dtype).view(block.part.shape)
            wanted.copy_(values[block.part.slices(part)])
        reading.check()


class BlockReading:
    """Reads a block's bytes one part after the other; what was read is only to be trusted after `check`."""

    def __init__(self, fd: int, block: Block, checksum: str, name: str) -> None:
        self._fd, self._block, self._checksum, self._name = fd, block, checksum, name
        self._at, self._digest = block.at, xxhash.xxh3_64()

    def read(self, into: Tensor) -> None:
        """The next bytes to a uint8 tensor."""
        whole = into.numpy().data
        for begin in range(0, len(whole), STEP_BYTES):
            view = whole[begin : begin + STEP_BYTES]
            read_into(self._fd, view, self._at)
            self._digest.update(view)
            self._at += len(view)

    def check(self) -> None:
        """Raises CheckpointError where the bytes aren't those that were written."""
        if self._digest.hexdigest() != self._checksum:
            block = self._block
            raise CheckpointError(
                f"tensor {self._name} is corrupt: the checksum of its part {list(block.part.shape)} at "
                f"{list(block.part.offsets)} (bytes {block.at} to {block.at + block.nbytes}) is wrong"
            )


def check_frame(fd: int, content: Manifest, index: int) -> None:
    """Check the bytes of a shard that belong to no tensor."""
    digest = xxhash.xxh3_64()
    for begin, end in content.holes[index]:
        digest.update(read_at(fd, end - begin, begin).numpy().data)
    if digest.hexdigest() != content.files[index].checksum:
        raise CheckpointError("its HDF5 structure isn't the one that was written: the file is corrupt or was changed")
