"""Reads a checkpoint of any size, a part at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from hpctrain.checkpoint.finding import memory_for
from hpctrain.contracts.checkpoint import StoredTensor
from hpctrain.contracts.pieces import Piece
from hpctrain_tools.checkpoint.common import Checkpoint

BATCH_BYTES = 256 * 2**20
"""The bytes of a checkpoint that commands hold in memory at a time."""


def batches(
    tensors: Mapping[str, StoredTensor], limit: int = BATCH_BYTES
) -> Iterator[list[tuple[str, tuple[int, ...], tuple[int, ...]]]]:
    """Lists of about `limit` bytes of all `tensors`, cut along dim 0, as (name, offsets, shape)."""
    batch: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    held = 0
    for name, tensor in tensors.items():
        rows = tensor.shape[0] if tensor.shape else 1
        step = max(1, limit * rows // max(tensor.nbytes, 1))
        for first in range(0, rows, step) if tensor.nbytes else [0]:
            offsets, shape = (0,) * len(tensor.shape), tensor.shape
            if tensor.nbytes and tensor.shape:
                offsets, shape = (first, *offsets[1:]), (min(step, rows - first), *shape[1:])
            batch.append((name, offsets, shape))
            held += tensor.nbytes * min(step, rows) // max(rows, 1)
            if held >= limit:
                yield batch
                batch, held = [], 0
    if batch:
        yield batch


def read_batch(
    checkpoint: Checkpoint,
    tensors: Mapping[str, StoredTensor],
    batch: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]],
) -> list[torch.Tensor]:
    """The values of a batch, in its order."""
    parts = [memory_for(name, shape, tensors[name].dtype) for name, _, shape in batch]
    pieces = [
        Piece(name, tensors[name].shape, offsets, part) for (name, offsets, _), part in zip(batch, parts, strict=True)
    ]
    checkpoint.format.load(checkpoint.path, pieces)
    return parts
