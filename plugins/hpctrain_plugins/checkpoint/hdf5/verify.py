"""Reads everything and reports one sentence per fault."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from hpctrain.api import CheckpointError
from hpctrain.toolkit.checkpoint.files import opened

from . import dtypes, index, manifest, structure
from .manifest import Manifest
from .plan import OfferedPiece
from .read import STEP_BYTES, BlockReading, Scratch, check_frame, read_manifest, read_table
from .table import Chunk, ShardTable, table_name

STRUCTURE_SECONDS = 300
"""The time limit for HDF5 to walk one shard's structure; 10,000 datasets take about a second."""

Progress = Callable[[int, int], None]


def verify(directory: Path, progress: Progress | None = None) -> list[str]:
    """The faults of a checkpoint, empty if it is intact. progress: called with the bytes done and in total."""
    try:
        content = read_manifest(directory)
    except (CheckpointError, OSError) as error:
        return [str(error)]
    done, total = 0, sum(math.prod(entry.layout.shape) * entry.dtype.itemsize for entry in content.tensors.values())
    found: list[str] = []

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    for number, shard in enumerate(content.shards):
        try:
            found_table = read_table(directory, content, number)
        except (CheckpointError, OSError) as error:
            found.append(str(error))
            continue
        path = directory / shard.name
        found += [f"{path}: {fault}" for fault in _file_faults(path, content, found_table, advance)]
    return found + _unknown_files(directory, content)


def _unknown_files(directory: Path, content: Manifest) -> list[str]:
    """Faults for unknown files. Any index.h5 is accepted: loading never opens it."""
    known = {manifest.FILE_NAME, index.FILE_NAME}
    known.update(name for shard in content.shards for name in (shard.name, table_name(shard.name)))
    return [
        f"{path}: the manifest doesn't know this file" for path in sorted(directory.iterdir()) if path.name not in known
    ]


def _file_faults(path: Path, content: Manifest, table: ShardTable, advance: Callable[[int], None]) -> list[str]:
    found = []
    try:
        with opened(path, table.size) as fd:
            for chunk in table.chunks:
                found += _chunk_faults(fd, chunk, advance)
            check_frame(fd, table)
    except (CheckpointError, OSError) as error:
        found.append(str(error))
    expected: structure.Expected = {}
    for chunk in table.chunks:
        offer = OfferedPiece(
            chunk.name, dtypes.name_of(chunk.dtype), content.tensors[chunk.name].layout.shape, chunk.part
        )
        expected[offer.dataset] = (
            chunk.at,
            offer.nbytes,
            dtypes.hdf5_type(chunk.dtype).encode().hex(),
            list(chunk.part.shape),
        )
    return found + _structure_faults(path, expected)


def _chunk_faults(fd: int, chunk: Chunk, advance: Callable[[int], None]) -> list[str]:
    found, scratch = [], Scratch()
    for block, checksum in chunk.blocks():
        try:
            reading = BlockReading(fd, block, checksum, chunk.name)
            for begin in range(0, block.nbytes, STEP_BYTES):
                reading.read(scratch.take(min(STEP_BYTES, block.nbytes - begin)))
            reading.check()
        except CheckpointError as error:
            found.append(str(error))
        advance(block.nbytes)
    return found


def _structure_faults(path: Path, expected: structure.Expected) -> list[str]:
    """The faults that HDF5 itself finds in the shard. It runs in a child process with a time limit; see structure.py."""
    if path.is_symlink() or not path.is_file():
        return []  # reported already
    try:
        child = subprocess.run(
            [sys.executable, structure.__file__, str(path)],
            input=json.dumps(expected),
            capture_output=True,
            text=True,
            timeout=STRUCTURE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [
            f"HDF5 did not finish reading its structure within {STRUCTURE_SECONDS} s: the file is damaged or crafted"
        ]
    if child.returncode != 0:
        why = (child.stderr.strip().splitlines() or ["no message"])[-1]
        return [f"reading its HDF5 structure ended with status {child.returncode}: {why}"]
    sentences: list[str] = json.loads(child.stdout)
    return sentences
