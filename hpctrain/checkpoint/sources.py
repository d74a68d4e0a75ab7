"""Tensors in files that others wrote: safetensors (one or several) and torch.save, read without running anything of them."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from hpctrain.checkpoint.pickles import check_pickle, check_records
from hpctrain.contracts.checkpoint import StoredTensor
from hpctrain.contracts.pieces import Piece
from hpctrain.errors import CheckpointError, shown
from hpctrain.files import SMALL_BYTES

SAFETENSORS_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip
"""What safetensors calls each dtype."""


_MOST_HEADER = 32 * 2**20
"""Bytes of what a file says of its tensors; of 10,000 tensors it has a megabyte."""
_MOST_SHARED = 4
"""How often the bytes of a file may be told of: names of one parameter share its values."""


class _Index(BaseModel):
    """*.safetensors.index.json."""

    weight_map: dict[str, str]


@dataclass(frozen=True)
class Source:
    """`tensors` by name, and `fill`, which puts their values into pieces named as they are.

    `check` reads all that `fill` would believe, so once is enough; it raises CheckpointError for what is damaged.
    """

    tensors: Mapping[str, StoredTensor]
    fill: Callable[[list[Piece]], None]
    check: Callable[[], None] = lambda: None


def open_safetensors(path: Path) -> Source:
    """Raises CheckpointError for a file that isn't whole, or a dtype that nothing here can hold."""
    from safetensors import SafetensorError, safe_open

    dtypes = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
    tensors = {}
    with path.open("rb") as raw:  # safe_open says of any that it can't read that it isn't there
        length = int.from_bytes(raw.read(8), "little")
        if length > _MOST_HEADER:
            raise CheckpointError(f"{path} isn't a whole safetensors file: its header has {length} bytes")
    try:
        file: Any = safe_open(path, framework="pt")
        for name in file.keys():  # noqa: SIM118 - no mapping
            _check_name(path, name)
            piece = file.get_slice(name)
            if piece.get_dtype() not in dtypes:
                raise CheckpointError(
                    f"{path}: {name} is of the dtype {piece.get_dtype()}, expected {', '.join(dtypes)}"
                )
            tensors[name] = StoredTensor(dtypes[piece.get_dtype()], tuple(piece.get_shape()), ())
    except (SafetensorError, MemoryError) as error:
        raise CheckpointError(f"{path} isn't a whole safetensors file: {error}") from error

    def part(piece: Piece) -> Tensor:
        if not piece.shape:
            return file.get_tensor(piece.name)  # type: ignore[no-any-return]  # a scalar has no slices
        return file.get_slice(piece.name)[_slices(piece)]  # type: ignore[no-any-return]  # reads only these rows

    return Source(tensors, lambda pieces: _fill(path, pieces, part))


def open_index(path: Path) -> Source:
    """Of the safetensors files that a large model is cut into, beside the table `path` of what lies where.

    Raises CheckpointError for a table that isn't one, or files that lack what it says.
    """
    with path.open("rb") as raw:
        content = raw.read(SMALL_BYTES + 1)
    try:
        if len(content) > SMALL_BYTES:
            raise ValueError(f"it has more than {SMALL_BYTES} bytes")
        places = _Index.model_validate_json(content).weight_map
    except ValueError as error:  # pydantic's is one
        why = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else error
        raise CheckpointError(f"{path} has no weight_map from tensors to file names: {why}") from error
    files = {file: path.parent / file for file in places.values() if Path(file).name == file}
    sources = {file: open_safetensors(where) for file, where in files.items() if where.is_file()}
    tensors = {}
    for name, file in places.items():
        if file not in sources or name not in sources[file].tensors:
            raise CheckpointError(f"{path}: {name} is to lie in {file!r} beside it, and doesn't")
        tensors[name] = sources[file].tensors[name]

    def fill(pieces: list[Piece]) -> None:
        for file, source in sources.items():
            source.fill([piece for piece in pieces if places[piece.name] == file])

    return Source(tensors, fill)


def open_torch(path: Path) -> Source:
    """Raises CheckpointError for what isn't a state dict: parameter names with their tensors."""
    _check_file(path)
    try:
        # Mapped, so that a rank reads what it takes; files of the oldest layout are no zip and can't be.
        content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError:
        raise
    except Exception as error:  # torch raises nearly anything here
        # Its first lines are advice to switch the safety off; the reason is marked.
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path} isn't a file of tensors that torch.load accepts: {reason}") from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        found = shown(list(content)[:3]) if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"{path} holds {found}, expected a state dict: parameter names with their tensors")
    for name, tensor in content.items():
        _check_name(path, name)
        kind = _odd_kind(tensor)
        if kind is not None:
            raise CheckpointError(
                f"{path}: {name} is a tensor of the kind {kind}, expected a dense one with its values"
            )
    tensors = {name: StoredTensor(tensor.dtype, tuple(tensor.shape), ()) for name, tensor in content.items()}
    told, there = sum(one.nbytes for one in tensors.values()), path.stat().st_size
    if told > _MOST_SHARED * there + 2**20:
        raise CheckpointError(
            f"{path}: its tensors tell of {told} bytes, and the file has {there}: they repeat values (Tensor.expand); "
            "save them with Tensor.contiguous()"
        )
    return Source(
        tensors,
        lambda pieces: _fill(path, pieces, lambda piece: content[piece.name][_slices(piece)]),
        lambda: _check_records(path),
    )


def _check_file(path: Path) -> None:
    """What torch would do with a file, and never come to an end with, before it does."""
    if not zipfile.is_zipfile(path):
        _check_oldest_layout(path)
        return
    try:
        with _Bounded(path) as file, zipfile.ZipFile(file) as records:
            check_records(records, path.stat().st_size)
    except OSError:
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}; torch.load it and torch.save it again") from error
    except Exception as error:  # zipfile raises several things for a damaged structure
        raise CheckpointError(f"{path} isn't a file of tensors that torch.load accepts: {error}") from error


class _Bounded(io.FileIO):
    """A file of which nothing is read that is too large for a table."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            size = os.fstat(self.fileno()).st_size - self.tell()
        if size > _MOST_HEADER:
            raise CheckpointError(f"it tells of a table of {size} bytes")
        return super().read(size)


def _check_oldest_layout(path: Path) -> None:
    """Five pickles and then the values; a number of which each begins with."""
    with path.open("rb") as file:
        raw = file.read(_MOST_HEADER)
    at = 0
    try:
        for _ in range(5):
            at = check_pickle(raw, at)
    except CheckpointError as error:
        raise CheckpointError(f"{path} isn't a file of tensors that torch.load accepts: {error}") from error


def _check_records(path: Path) -> None:
    """The CRC-32 of each record; a file of the oldest layout, which is no zip, has none."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as records:
            damaged = records.testzip()
    except OSError:
        raise
    except Exception as error:  # zipfile raises several things for a damaged structure
        raise CheckpointError(f"{path} is corrupt: {error}") from error
    if damaged is not None:
        raise CheckpointError(
            f"{path} is corrupt: the CRC of {damaged} is wrong; it was damaged, or saved without CRCs "
            "(torch.serialization.set_crc32_options(False)): copy it anew, or save it with them"
        )


def _odd_kind(tensor: Tensor) -> str | None:
    """What sets it apart from a rectangle of numbers; None if it is one."""
    if tensor.is_nested or tensor.is_meta:
        return "nested" if tensor.is_nested else "meta"
    if tensor.layout != torch.strided:
        return str(tensor.layout)
    return str(tensor.dtype) if tensor.is_quantized else None


def _check_name(path: Path, name: str) -> None:
    """As in our checkpoints: it is shown on terminals."""
    if not name.isprintable():
        raise CheckpointError(f"{path}: {name!r} can't name a tensor: expected printable characters")


def _slices(piece: Piece) -> tuple[slice, ...]:
    ends = (offset + length for offset, length in zip(piece.offsets, piece.tensor.shape, strict=True))
    return tuple(slice(begin, end) for begin, end in zip(piece.offsets, ends, strict=True))


def _fill(path: Path, pieces: list[Piece], part: Callable[[Piece], Tensor]) -> None:
    for piece in pieces:
        values = part(piece)
        if not torch.can_cast(values.dtype, piece.tensor.dtype):
            raise CheckpointError(f"{path}: {piece.name} is {values.dtype}, expected {piece.tensor.dtype}")
        with torch.no_grad():
            piece.tensor.copy_(values)
