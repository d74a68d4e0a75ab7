"""The files of offline runs of wandb, which no server has yet: rows whose steps run again are cut off.

A file is a header and a log in LevelDB's format: blocks of 32 KiB with chunks, of which one or several make a record.
"""

from __future__ import annotations

import logging
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from hpctrain.api import open_regular, reading, reason

LOG = logging.getLogger("hpctrain")
# bytes of the file's header, of a block, and of a chunk's header: checksum, length, kind
_HEADER, _BLOCK, _CHUNK = 7, 2**15, 7
# kinds of chunks that end a record
_WHOLE, _LAST = 1, 4


def cut_off_after(directory: Path, run_id: str, number: int) -> int:
    """Drop the rows of `run_id` after wandb's step `number`, and what follows them, from files that were not synced. Returns the
    step of the newest row that is left; -1 without one."""
    for path in sorted(directory.glob(f"offline-run-*/run-{run_id}.wandb"), reverse=True):  # the newest first
        is_synced = path.with_name(f"{path.name}.synced").exists()
        try:
            newest, end = _rows_of(path, sys.maxsize if is_synced else number)
            if end is not None:
                fd = open_regular(path, os.O_WRONLY)
                os.ftruncate(fd, end)
                os.close(fd)
        except (OSError, ValueError) as error:
            LOG.warning("wandb: %s can't be cut; steps that run again are in it twice: %s", path, reason(error))
            return number
        if newest >= 0:
            return newest  # older files have older rows
    return -1


def _rows_of(path: Path, number: int) -> tuple[int, int | None]:
    """The step of the last row up to `number`, -1 without one, and where the first row after it begins."""
    from google.protobuf.message import DecodeError  # here: these are an extra
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2
    newest = -1
    with reading(path) as fd, open(fd, "rb", closefd=False) as file:
        for begin, content in _records(file):
            try:
                record = messages.Record.FromString(content)
            except DecodeError as error:
                raise ValueError(f"the record at byte {begin} can't be read") from error
            if record.WhichOneof("record_type") == "history":
                if record.history.step.num > number:
                    return newest, begin
                newest = record.history.step.num
    return newest, None


def _records(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Each whole record with the place where it begins; a record that a crash has cut short is left out."""
    at, begin, content = _HEADER, _HEADER, b""
    file.seek(at)
    while True:
        left = _BLOCK - at % _BLOCK
        if left < _CHUNK:  # filled with zeros
            file.seek(left, os.SEEK_CUR)
            at += left
        header = file.read(_CHUNK)
        if len(header) < _CHUNK:
            return
        _, length, kind = struct.unpack("<IHB", header)
        content += file.read(length)
        at += _CHUNK + length
        if kind in (_WHOLE, _LAST):
            yield begin, content
            begin, content = at, b""
