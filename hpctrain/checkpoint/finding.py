"""Checkpoints that a person names: what is at a path, of which format, and what a run has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hpctrain.checkpoint.directory import CheckpointDirectory
from hpctrain.contracts.checkpoint import CheckpointFormat, StoredTensor
from hpctrain.contracts.pieces import Piece
from hpctrain.errors import CheckpointError, UsageError

BATCH_BYTES = 256 * 2**20
"""What commands hold of a checkpoint in memory at a time."""


@dataclass(frozen=True)
class Checkpoint:
    """A directory and the format that recognizes it."""

    path: Path
    format: CheckpointFormat

    def files(self) -> dict[str, int]:
        """Its files with their bytes, by their paths within the directory."""
        found = (path for path in sorted(self.path.rglob("*")) if path.is_file() and not path.is_symlink())
        return {str(path.relative_to(self.path)): path.stat().st_size for path in found}


def find_checkpoint(path: Path, formats: Sequence[CheckpointFormat]) -> Checkpoint:
    """The checkpoint at `path`; UsageError when there is none, with those of the run if it is one."""
    if not path.exists():
        raise UsageError(f"there is no checkpoint {path}")
    format = recognize(path, formats)
    if format is None:
        known = ", ".join(one.name for one in formats)
        raise UsageError(f"{path} isn't a checkpoint of a known format ({known}){hint_of(path)}")
    return Checkpoint(path, format)


def hint_of(path: Path) -> str:
    """The end of a sentence that refuses `path` as a checkpoint: those of the run, if it is one."""
    run = root_of(path)
    return "" if run is None else f"; this run has {', '.join(str(one) for one in run.candidates()[:3])}"


def recognize(path: Path, formats: Iterable[CheckpointFormat]) -> CheckpointFormat | None:
    """The first of `formats` that recognizes the directory `path`."""
    return next((one for one in formats if one.recognizes(path)), None) if path.is_dir() else None


def root_of(run: Path) -> CheckpointDirectory | None:
    """The directory of a run's checkpoints, given that or the run's output_dir; None when there are no checkpoints."""
    for root in (run / "checkpoints", run):
        directory = CheckpointDirectory(root)
        if directory.candidates():
            return directory
    return None


def batches(
    tensors: Mapping[str, StoredTensor], limit: int = BATCH_BYTES
) -> Iterator[list[tuple[str, tuple[int, ...], tuple[int, ...]]]]:
    """All of `tensors` as (name, offsets, shape), cut along dim 0, in lists of about `limit` bytes."""
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


def memory_for(name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for values of the tensor `name`; a crafted file can tell of any shape."""
    try:
        return torch.empty(tuple(shape), dtype=dtype)
    except (RuntimeError, TypeError) as error:  # torch says so that there is too little, or could never be enough
        raise CheckpointError(f"{list(shape)} values of the tensor {name} ({dtype}) don't fit into memory") from error
