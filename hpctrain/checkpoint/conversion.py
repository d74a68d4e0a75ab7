"""Weights out of a checkpoint into files that other programs read, and into a checkpoint from such files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from hpctrain.checkpoint.directory import sync_directory
from hpctrain.checkpoint.finding import batches
from hpctrain.checkpoint.sources import SAFETENSORS_DTYPES, Source
from hpctrain.checkpoint.weights import MODEL, open_weights
from hpctrain.contracts.checkpoint import CheckpointFormat, StoredTensor
from hpctrain.contracts.pieces import Piece, State
from hpctrain.errors import CheckpointError, UsageError

Progress = Callable[[int, int], None]


def export_safetensors(source: Source, path: Path, progress: Progress) -> None:
    """Write `source` to the new file `path`; what is held in memory doesn't grow with the model."""
    order = sorted(source.tensors, key=lambda name: -source.tensors[name].dtype.itemsize)  # so that each is aligned
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
    with new_file(path) as temporary:
        with open(temporary, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        if end:
            # The file itself is the memory that is filled.
            mapped = torch.from_file(str(temporary), shared=True, size=8 + len(text) + end, dtype=torch.uint8)
            data = mapped[8 + len(text) :]
            _fill(source, {name: _view(data, places[name], source.tensors[name]) for name in order}, progress)


def export_torch(source: Source, path: Path, progress: Progress) -> None:
    """Write `source` as a state dict to the new file `path` with torch.save; holds all of it in memory."""
    tensors = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in source.tensors.items()}
    with new_file(path) as temporary:
        _fill(source, tensors, progress)
        torch.save(tensors, temporary)


def import_weights(
    path: Path,
    formats: Sequence[CheckpointFormat],
    prefix: str,
    format: CheckpointFormat,
    out: Path,
    progress: Progress,
) -> int:
    """Write the weights at `path` whose names begin with `prefix`, without it, as the new checkpoint `out`.

    Holds them all in memory. Returns how many tensors there are. CheckpointError when none has the prefix.
    """
    source = open_weights(path, formats)
    chosen = {name: one for name, one in source.tensors.items() if name.startswith(prefix)}
    if not chosen:
        found = ", ".join(list(source.tensors)[:3]) or "no tensor at all"
        raise CheckpointError(f"{path} has no tensor whose name begins with {prefix!r}; found {found}")
    tensors = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in chosen.items()}
    _fill(Source(chosen, source.fill), tensors, progress)
    pieces = [Piece.whole(MODEL + name.removeprefix(prefix), tensor) for name, tensor in tensors.items()]
    with new_directory(out) as temporary, alone() as group:
        format.write(State(pieces, {"step": 0, "imported_from": path.name}), temporary, group)
    return len(pieces)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """An empty file to write to; at the end it is synced and gets the name `path`, on an exception it is removed."""
    temporary = _name_until_whole(path, "file")
    temporary.touch(exist_ok=False)
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.absolute().parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """As `new_file`, for a directory."""
    temporary = _name_until_whole(path, "directory")
    temporary.mkdir()
    try:
        yield temporary
        sync_directory(temporary)
        temporary.rename(path)
        sync_directory(path.absolute().parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _name_until_whole(path: Path, kind: str) -> Path:
    """What `path` is called while it is written; UsageError when there is something of either name, or no place."""
    if os.path.lexists(path):
        raise UsageError(f"{path} exists already; expected a new {kind}: give another name")
    temporary = path.with_name(path.name + ".tmp")
    if os.path.lexists(temporary):
        raise UsageError(
            f"{temporary} exists already, and {path} is written under that name: remove it, or give another name"
        )
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: there is no directory {path.parent}; make it, or give another name")
    return temporary


@contextmanager
def alone() -> Iterator[dist.ProcessGroup]:
    """A group of this process only, for formats, whose `write` is collective."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()


def _view(data: Tensor, at: int, tensor: StoredTensor) -> Tensor:
    return data[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _fill(source: Source, tensors: Mapping[str, Tensor], progress: Progress) -> None:
    """Fill whole tensors part by part, so that progress is seen."""
    done, total = 0, sum(one.nbytes for one in source.tensors.values())
    for batch in batches(source.tensors):
        pieces = []
        for name, offsets, shape in batch:
            whole = tensors[name]
            part = whole.narrow(0, offsets[0], shape[0]) if shape else whole
            pieces.append(Piece(name, tuple(whole.shape), offsets, part))
        source.fill(pieces)
        done += sum(piece.tensor.nbytes for piece in pieces)
        progress(done, total)
