"""Reading: each item is checked by the CRCs of its zip records and unpacked with weights_only."""

from __future__ import annotations

import io
import os
import zipfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from hpctrain.api import CheckpointError, Piece
from hpctrain.toolkit.checkpoint.files import opened, read_at
from hpctrain.toolkit.checkpoint.rectangles import Rectangle
from hpctrain.toolkit.checkpoint.values import check_fits

from .metadata import Item, SavedContents, Tensor


def load(directory: Path, contents: SavedContents, pieces: list[Piece]) -> None:
    """Fill the pieces, reading each item once. Raises CheckpointError with the file and the tensor of a fault."""
    wanted: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        tensor = contents.tensors.get(piece.name)
        if tensor is None:
            raise CheckpointError(f"{directory}: there is no tensor {piece.name}")
        check_fits(directory, piece, tensor.shape, tensor.dtype)
        wanted[piece.name].append(piece)
    for name, mine in wanted.items():
        filled = [0] * len(mine)
        for item in contents.tensors[name].items:
            overlaps = [item.part.overlap(_rectangle(piece)) for piece in mine]
            if any(overlaps):
                values = read_item(directory, name, contents.tensors[name], item)
                for number, (piece, part) in enumerate(zip(mine, overlaps, strict=True)):
                    if part is not None:
                        into = piece.tensor.detach()[_rectangle(piece).slices(part)]
                        into.copy_(values[item.part.slices(part)])
                        filled[number] += part.volume
        for piece, count in zip(mine, filled, strict=True):
            if count != piece.tensor.numel():
                raise CheckpointError(
                    f"{directory}: tensor {name} has {count} of the {piece.tensor.numel()} elements asked for"
                )


def read_item(directory: Path, name: str, tensor: Tensor, item: Item) -> torch.Tensor:
    """The checked values of an item."""
    try:
        content = _checked_bytes(directory, item)
        values = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{directory / item.file}: tensor {name}: {error}") from error
    except Exception as error:  # torch can raise almost any error here
        raise CheckpointError(
            f"{directory / item.file}: tensor {name} is corrupt: its part at {list(item.part.offsets)} (bytes {item.at} to "
            f"{item.at + item.length}) isn't what torch.save writes"
        ) from error
    if (
        not isinstance(values, torch.Tensor)
        or values.layout != torch.strided
        or (values.dtype, tuple(values.shape)) != (tensor.dtype, item.part.shape)
    ):
        raise CheckpointError(
            f"{directory / item.file}: tensor {name}: its part at {list(item.part.offsets)} isn't the {tensor.dtype} "
            f"{list(item.part.shape)} that .metadata promises"
        )
    return values


def _checked_bytes(directory: Path, item: Item) -> bytes:
    with opened(directory / item.file) as fd:
        size = os.fstat(fd).st_size
        if item.at + item.length > size:
            raise CheckpointError(f"its part ends at byte {item.at + item.length} of {size}: the file was cut off")
        content = read_at(fd, item.length, item.at).numpy().tobytes()
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as records:
            damaged = records.testzip()
    except Exception as error:  # zipfile raises several errors for a damaged structure
        raise CheckpointError(
            f"it is corrupt: bytes {item.at} to {item.at + item.length} are not a zip file: {error}"
        ) from error
    if damaged is not None:
        raise CheckpointError(
            f"it is corrupt: the CRC of {damaged} (bytes {item.at} to {item.at + item.length}) is wrong"
        )
    return content


def verify(directory: Path, contents: SavedContents, progress: Callable[[int, int], None] | None) -> list[str]:
    """Read everything; return one sentence per fault. Other values than tensors are checked by CRC, never unpickled."""
    faults = []
    items = [(name, tensor, item) for name, tensor in contents.tensors.items() for item in tensor.items]
    done, total = 0, sum(item.length for _, _, item in items)
    for name, tensor, item in items:
        try:
            read_item(directory, name, tensor, item)
        except CheckpointError as error:
            faults.append(str(error))
        done += item.length
        if progress is not None:
            progress(done, total)
    for name, item in contents.others.items():
        try:
            _checked_bytes(directory, item)
        except (CheckpointError, OSError) as error:
            faults.append(f"{directory / item.file}: {name}: {error}")
    return faults


def _rectangle(piece: Piece) -> Rectangle:
    return Rectangle(tuple(piece.offsets), tuple(piece.tensor.shape))
