"""The HDF5 part of a shard: everything in the file except the tensors' bytes.

HDF5 lays the file out once, in memory. Every save of the same plan repeats its bytes with plain writes. So only the first
save uses HDF5 (and h5py's global lock), and disk errors come from the operating system with their number.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import h5py
import numpy as np
import torch
import xxhash
from h5py import h5a, h5d, h5p, h5s, h5t

from hpctrain.api import CheckpointError
from hpctrain.toolkit.checkpoint.files import memory_file

from . import dtypes
from .plan import OfferedPiece
from .table import holes


@dataclass(frozen=True)
class Template:
    """positions[i]: the byte where chunk i begins (0 if it is empty). sequence: the file in order; each entry is the number
    of a chunk, or bytes that are not tensors' data. checksum: over these bytes."""

    size: int
    positions: list[int]
    sequence: list[int | bytes]
    checksum: str


def make_template(offers: Sequence[OfferedPiece]) -> Template:
    """Let HDF5 lay out a file with one dataset per offer."""
    with memory_file() as memory:
        # v110 keeps the file readable for tools of HDF5 1.10. Alignment lets large tensors begin on a page, and
        # large metadata blocks keep HDF5's own structures together.
        with h5py.File(
            memory,
            "w",
            libver=("v110", "v110"),
            alignment_threshold=64 * 1024,
            alignment_interval=4096,
            meta_block_size=2**20,
        ) as file:
            positions = [_create(file.id, offer) for offer in offers]
        size = os.fstat(memory.fileno()).st_size
        spans = sorted((at, at + one.nbytes) for at, one in zip(positions, offers, strict=True) if one.nbytes)
        if spans and spans[-1][1] > size:
            raise CheckpointError(
                "HDF5 laid out a file that is smaller than its data; this version of HDF5 can't be used"
            )
        frame = [(begin, os.pread(memory.fileno(), end - begin, begin)) for begin, end in holes(spans, size)]
    places: list[tuple[int, int | bytes]] = [*frame]
    places += [(at, number) for number, (at, one) in enumerate(zip(positions, offers, strict=True)) if one.nbytes]
    sequence = [what for _, what in sorted(places, key=lambda place: place[0])]
    checksum = xxhash.xxh3_64_hexdigest(b"".join(content for _, content in frame))
    return Template(size, positions, sequence, checksum)


def _create(file: h5py.h5f.FileID, offer: OfferedPiece) -> int:
    """Create a contiguous dataset with allocated but unfilled space; return its first byte."""
    creation = h5p.create(h5p.DATASET_CREATE)
    creation.set_layout(h5d.CONTIGUOUS)
    creation.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5d.FILL_TIME_NEVER)
    creation.set_obj_track_times(False)  # equal plans give equal frames
    shape, dtype = offer.part.shape, dtypes.by_name(offer.dtype)
    space = h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)
    return create_dataset(file, offer.dataset, dtype, space, creation).get_offset() or 0


def create_dataset(
    file: h5py.h5f.FileID, path: str, dtype: torch.dtype, space: h5s.SpaceID, creation: h5p.PropDCID
) -> h5d.DatasetID:
    """Create a dataset of `dtype` and its groups, with the attribute that explains plain bits."""
    dataset = h5d.create(file, path.encode(), dtypes.hdf5_type(dtype), space, dcpl=creation, lcpl=create_links())
    if dtypes.is_bits_only(dtype):
        # Fixed length: variable-length strings are in HDF5's global heap, where one flipped bit can hang HDF5.
        text = np.array(dtypes.name_of(dtype).encode())
        kind = h5t.py_create(text.dtype)
        h5a.create(dataset, b"dtype", kind, h5s.create(h5s.SCALAR)).write(text)
    return dataset


def create_links() -> h5p.PropLCID:
    """Properties for new links: UTF-8, and groups on the path are created."""
    links = h5p.create(h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(h5t.CSET_UTF8)
    return links
