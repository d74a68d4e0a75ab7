"""Reads the object headers of each dataset in a shard, without HDF5. They reveal a dtype that was changed in the manifest
with matching checksums.

The layout is given by the HDF5 File Format Specification, IV.A.1.b (version 2 object headers): a signature, then messages with
a type, a length and flags. A dataset's header has its dataspace, its datatype and the place of its values.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

import torch

from hpctrain.api import CheckpointError

from . import dtypes
from .table import Chunk

LONGEST = 1024
"""The longest header, in bytes, with the most dims that HDF5 allows."""
_SIGNATURE = b"OHDR\x02"
_DATASPACE, _DATATYPE, _LAYOUT, _ATTRIBUTE = 1, 3, 8, 12
_CONTIGUOUS = b"\x03\x01"
# datatype classes with equal messages for equal types: integers and floats
_PLAIN = (0, 1)


class DatasetForm(NamedTuple):
    """The messages of a dataset's header."""

    space: bytes
    kind: bytes
    attribute: bytes


class Forms:
    """Collects the datasets of a shard from its bytes as they are read, keyed by the first byte of their values."""

    def __init__(self) -> None:
        self._found: dict[int, DatasetForm] = {}
        self._types: dict[torch.dtype, bytes] = {}
        self._rest = b""

    def add(self, piece: bytes, is_last: bool) -> None:
        """Add the next bytes of a stretch outside of all chunks. is_last: they are its last bytes."""
        raw = self._rest + piece
        end = len(raw) if is_last else max(0, len(raw) - LONGEST)
        at = raw.find(_SIGNATURE, 0, end)
        while at >= 0:
            self._read(raw, at)
            at = raw.find(_SIGNATURE, at + 1, end)
        self._rest = b"" if is_last else raw[end:]

    def check(self, chunks: Iterable[Chunk]) -> None:
        """Raises CheckpointError for a tensor with another dtype, shape or place in the file."""
        for chunk in chunks:
            form = self._found.get(chunk.at)
            if chunk.part.volume and (form is None or not self._is_of(form, chunk)):
                raise CheckpointError(
                    f"tensor {chunk.name}: the file has no dataset of {chunk.dtype} {list(chunk.part.shape)} at byte {chunk.at}, "
                    "but the manifest says so: one of them was changed"
                )

    def _read(self, raw: bytes, at: int) -> None:
        flags = raw[at + 5] if at + 5 < len(raw) else 0
        at += 6 + 16 * (flags >> 5 & 1) + 4 * (flags >> 4 & 1)
        width = 1 << (flags & 3)
        end = min(len(raw), at + width + int.from_bytes(raw[at : at + width], "little"))
        at += width
        extra = 2 * (flags >> 2 & 1)
        found: dict[int, bytes] = {}
        while at + 4 <= end:
            length = raw[at + 1] | raw[at + 2] << 8
            begin = at + 4 + extra
            at, kind = begin + length, raw[at]
            if kind:
                found[kind] = raw[begin:at]
        layout = found.get(_LAYOUT, b"")
        if layout[:2] == _CONTIGUOUS:
            form = DatasetForm(found.get(_DATASPACE, b""), found.get(_DATATYPE, b""), found.get(_ATTRIBUTE, b""))
            self._found[int.from_bytes(layout[2:10], "little")] = form

    def _is_of(self, form: DatasetForm, chunk: Chunk) -> bool:
        shape = chunk.part.shape
        if form.space[1:2] != bytes([len(shape)]) or form.space[4 : 4 + 8 * len(shape)] != struct.pack(
            f"<{len(shape)}Q", *shape
        ):
            return False
        if chunk.dtype not in self._types:
            self._types[chunk.dtype] = dtypes.hdf5_type(chunk.dtype).encode()[2:]
        wanted, kind = self._types[chunk.dtype], form.kind
        same = kind == wanted if wanted[0] & 15 in _PLAIN else kind[:1] != b"" and kind[0] & 15 == wanted[0] & 15
        named = dtypes.name_of(chunk.dtype).encode() in form.attribute
        return same and kind[4:8] == wanted[4:8] and (named if dtypes.is_bits_only(chunk.dtype) else not form.attribute)
