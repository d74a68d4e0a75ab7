"""Exports weights from a checkpoint to files that other programs read, and imports such files into a checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpctrain.base.errors import CheckpointError
from hpctrain.base.safe_files import sync_directory
from hpctrain.checkpoint.finding import memory_for
from hpctrain.checkpoint.sources import SAFETENSORS_DTYPES, WeightsSource
from hpctrain.checkpoint.state import MODEL
from hpctrain.checkpoint.weights import open_weights
from hpctrain.contracts.checkpoint import CheckpointFormat
from hpctrain.contracts.pieces import Piece, State
from hpctrain_tools.checkpoint.batches import batches
from hpctrain_tools.checkpoint.writing import alone, name_until_whole, new_directory, writing

Progress = Callable[[int, int], None]


def export_safetensors(source: WeightsSource, path: Path, progress: Progress) -> None:
    """Write `source` to the new file `path`; memory use doesn't grow with the model."""
    order = sorted(source.tensors, key=lambda name: -source.tensors[name].dtype.itemsize)  # aligns every tensor
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places, end = {}, 0
    for name in order:
        tensor = source.tensors[name]
        if tensor.dtype not in SAFETENSORS_DTYPES:
            raise CheckpointError(f"{name} is {tensor.dtype}, which safetensors doesn't hold; export --to torch does")
        places[name], begin, end = end, end, end + tensor.nbytes
        kind = SAFETENSORS_DTYPES[tensor.dtype]
        header[name] = {"dtype": kind, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 16)
    with new_file(path) as fd:
        # Not through a memory mapping: on a full disk that kills the process with a signal.
        write_at(fd, len(text).to_bytes(8, "little") + text, 0, path)
        for pieces in _read(
            source, lambda name, _, shape: memory_for(name, shape, source.tensors[name].dtype), progress
        ):
            for piece in pieces:
                rows = piece.tensor.reshape(-1).view(torch.uint8).numpy().data
                before = piece.offsets[0] * (len(rows) // piece.tensor.shape[0]) if len(rows) and piece.shape else 0
                write_at(fd, rows, 8 + len(text) + places[piece.name] + before, path)


def export_torch(source: WeightsSource, path: Path, progress: Progress, tied: Sequence[Sequence[str]] = ()) -> None:
    """Write `source` as a state dict to the new file `path` with torch.save; holds all of it in memory.

    tied: the names of each tied parameter; the file has it under all of them, as `state_dict()` does.
    """
    tensors = {name: memory_for(name, one.shape, one.dtype) for name, one in source.tensors.items()}
    with new_file(path) as fd:
        _fill(source, tensors, progress)
        for first, *others in tied:
            tensors.update((name, tensors[first]) for name in others if first in tensors and name not in tensors)
        with writing(path), open(fd, "wb", closefd=False) as file:
            try:
                torch.save(tensors, file)
            except RuntimeError as error:  # from closing the zip, which hides the operating system's own error
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise


def import_weights(
    path: Path,
    formats: Sequence[CheckpointFormat],
    prefix: str,
    format: CheckpointFormat,
    out: Path,
    progress: Progress,
) -> tuple[int, tuple[str, ...]]:
    """Write the weights at `path` whose names begin with `prefix` as the new checkpoint `out`, without the prefix.

    Holds all of them in memory. Returns the number of tensors, and remarks on them. CheckpointError if none has the prefix.
    """
    source = open_weights(path, formats)
    source.check()
    chosen = {name: one for name, one in source.tensors.items() if name.startswith(prefix)}
    if not source.tensors:
        raise CheckpointError(f"{path} holds no tensor at all, expected a model's weights")
    if not chosen:
        found = ", ".join(list(source.tensors)[:3])
        raise CheckpointError(f"{path} has no tensor whose name begins with {prefix!r}; found {found}")
    tensors = {name: memory_for(name, one.shape, one.dtype) for name, one in chosen.items()}
    _fill(WeightsSource(chosen, source.fill), tensors, progress)
    pieces = [Piece.whole(MODEL + name.removeprefix(prefix), tensor) for name, tensor in tensors.items()]
    with writing(out), new_directory(out) as temporary, alone() as group:
        format.writer().write(State(pieces, {"step": 0, "imported_from": path.name}), temporary, group)
    return len(pieces), source.remarks


def write_at(fd: int, content: memoryview | bytes, at: int, path: Path) -> None:
    """Write all of `content` from byte `at` on to the file that will be `path`."""
    rest = memoryview(content)
    with writing(path):
        while rest:
            written = os.pwrite(fd, rest, at)
            rest, at = rest[written:], at + written


@contextmanager
def new_file(path: Path) -> Iterator[int]:
    """The descriptor of a new file. At the end the file is synced and renamed to `path`; on an exception it is removed."""
    temporary = name_until_whole(path, "file")
    with writing(path):
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield fd
        with writing(path):
            os.fsync(fd)
            temporary.replace(path)
            sync_directory(path.absolute().parent)
    finally:
        os.close(fd)
        temporary.unlink(missing_ok=True)


def _fill(source: WeightsSource, tensors: Mapping[str, Tensor], progress: Progress) -> None:
    """Fill whole tensors."""

    def part(name: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        return tensors[name].narrow(0, offsets[0], shape[0]) if shape else tensors[name]

    for _ in _read(source, part, progress):
        pass


def _read(
    source: WeightsSource, part: Callable[[str, Sequence[int], Sequence[int]], Tensor], progress: Progress
) -> Iterator[list[Piece]]:
    """Read all of `source` in batches, with progress; `part` gives the memory for a name, offsets and shape."""
    done, total = 0, sum(one.nbytes for one in source.tensors.values())
    for batch in batches(source.tensors):
        pieces = [
            Piece(name, source.tensors[name].shape, offsets, part(name, offsets, shape))
            for name, offsets, shape in batch
        ]
        source.fill(pieces)
        yield pieces
        done += sum(piece.tensor.nbytes for piece in pieces)
        progress(done, total)
