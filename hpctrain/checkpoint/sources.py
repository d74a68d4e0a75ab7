"""Tensors in files that others wrote: safetensors (one or several) and torch.save, read without running anything of them."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpctrain.contracts.checkpoint import StoredTensor
from hpctrain.contracts.pieces import Piece
from hpctrain.errors import CheckpointError

SAFETENSORS_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip
"""What safetensors calls each dtype."""


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
    path.open("rb").close()  # safe_open says of any that it can't read that it isn't there
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
    except SafetensorError as error:
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
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {file: path.parent / file for file in places.values() if Path(file).name == file}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} has no weight_map from tensors to file names: {error!r}") from error
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
    _refuse_compressed(path)
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
        found = list(content)[:3] if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"{path} holds {found}, expected a state dict: parameter names with their tensors")
    for name, tensor in content.items():
        _check_name(path, name)
        kind = _odd_kind(tensor)
        if kind is not None:
            raise CheckpointError(
                f"{path}: {name} is a tensor of the kind {kind}, expected a dense one with its values"
            )
    tensors = {name: StoredTensor(tensor.dtype, tuple(tensor.shape), ()) for name, tensor in content.items()}
    return Source(
        tensors,
        lambda pieces: _fill(path, pieces, lambda piece: content[piece.name][_slices(piece)]),
        lambda: _check_records(path),
    )


def _refuse_compressed(path: Path) -> None:
    """torch takes the bytes of a record for values as they lie in a mapped file, and unpacks it to any size in another."""
    try:
        with zipfile.ZipFile(path) as records:
            packed = [one.filename for one in records.infolist() if one.compress_type != zipfile.ZIP_STORED]
    except OSError:
        raise
    except Exception:  # zipfile raises several things for a damaged structure
        return  # damaged, which is told later, or of the oldest layout, which is no zip
    if packed:
        raise CheckpointError(
            f"{path} was compressed ({packed[0]}), expected it as torch.save writes it: torch.load it and torch.save it again"
        )


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
