"""index.h5: virtual datasets that show full tensors to every HDF5 tool. It is for people; loading never opens it.

It depends only on the plan, not on the values: HDF5 makes it once, in memory, and every save writes the same bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import h5py
import numpy as np
import torch
from h5py import h5d, h5p, h5s

from hpctrain.toolkit.checkpoint.files import memory_file

from . import dtypes
from .plan import OfferedPiece, SavePlan
from .template import create_dataset, create_links

FILE_NAME = "index.h5"
MAX_CHUNKS = 100_000
"""The most chunks of a shard with an index: HDF5 needs 30 to 100 us and 100 to 150 bytes for each."""


def make_index(plan: SavePlan, shard_names: Sequence[str]) -> bytes | None:
    """The bytes of index.h5, with `shard_names[rank]`; None if there are too many chunks."""
    if sum(map(len, plan.offers)) > MAX_CHUNKS:
        return None
    chunks: dict[str, list[tuple[str, OfferedPiece]]] = {name: [] for name in plan.tensors}
    for file, offers in zip(shard_names, plan.offers, strict=True):
        for offer in offers:
            chunks[offer.name].append((file, offer))
    with memory_file() as memory:
        with h5py.File(memory, "w", libver=("v110", "v110")) as file:
            for name, (dtype, shape) in plan.tensors.items():
                if math.prod(shape) == 0 or not shape:  # HDF5 has no virtual datasets of these
                    source, offer = chunks[name][0]
                    file.id.links.create_external(
                        name.encode(), source.encode(), offer.dataset.encode(), create_links()
                    )
                else:
                    _create_virtual(file.id, name, dtypes.by_name(dtype), shape, chunks[name])
        return os.pread(memory.fileno(), os.fstat(memory.fileno()).st_size, 0)


def _create_virtual(
    file: h5py.h5f.FileID, name: str, dtype: torch.dtype, shape: tuple[int, ...], chunks: list[tuple[str, OfferedPiece]]
) -> None:
    creation = h5p.create(h5p.DATASET_CREATE)
    creation.set_layout(h5d.VIRTUAL)
    creation.set_obj_track_times(False)
    if dtype.is_floating_point and not dtypes.is_bits_only(dtype):
        creation.set_fill_value(np.array(np.nan, "<f4"))  # read for missing shards
    for source, offer in chunks:
        into = h5s.create_simple(shape)
        into.select_hyperslab(offer.part.offsets, (1,) * len(shape), block=offer.part.shape)
        # HDF5 would take "%b" for a pattern of names.
        dataset = offer.dataset.replace("%", "%%").encode()
        creation.set_virtual(into, source.encode(), dataset, h5s.create_simple(offer.part.shape))
    create_dataset(file, name, dtype, h5s.create_simple(shape), creation)
