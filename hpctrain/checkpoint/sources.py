"""Reads tensors from files of other programs, safetensors (one or several) and torch.save, without running code in them."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from hpctrain.base.errors import CheckpointError, shown
from hpctrain.base.safe_files import SMALL_BYTES
from hpctrain.checkpoint.pickles import check_pickle, check_records
from hpctrain.contracts.checkpoint import StoredTensor
from hpctrain.contracts.pieces import Piece

SAFETENSORS_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip
"""safetensors' names of dtypes."""


_MOST_HEADER = 32 * 2**20
"""Bytes of a file's table of tensors; 10,000 tensors take a megabyte."""
_MOST_SHARED = 4
"""How many times a file's size its tensors may add up to: the names of a tied parameter share its values."""

_STATE_DICTS = frozenset(("state_dict", "model_state_dict", "model", "module", "net", "network", "weights"))
"""Names under which training programs save a model's parameters."""
_DEEPEST = 3
"""How many dicts deep a state dict is looked for."""


class _SafetensorsIndex(BaseModel):
    """*.safetensors.index.json."""

    weight_map: dict[str, str]


@dataclass(frozen=True)
class WeightsSource:
    """`tensors` by name, and `fill`, which copies their values into pieces of the same names.

    `check` verifies all values that `fill` would trust; one call is enough. It raises CheckpointError for damage.
    remarks: what a user should know of how the tensors were found.
    """

    tensors: Mapping[str, StoredTensor]
    fill: Callable[[list[Piece]], None]
    check: Callable[[], None] = lambda: None
    remarks: tuple[str, ...] = ()

    def renamed(self, names: Mapping[str, str], remark: str) -> WeightsSource:
        """The same tensors under `names`: the new name of each, and the stored one."""

        def fill(pieces: list[Piece]) -> None:
            self.fill([replace(piece, name=names[piece.name]) for piece in pieces])

        tensors = {name: self.tensors[stored] for name, stored in names.items()}
        return WeightsSource(tensors, fill, self.check, (*self.remarks, remark))


def open_safetensors(path: Path) -> WeightsSource:
    """Raises CheckpointError for a file that isn't whole, or for an unsupported dtype."""
    from safetensors import SafetensorError, safe_open

    dtypes = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
    tensors = {}
    with path.open("rb") as raw:  # safe_open reports any file that it can't read as missing
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

    return WeightsSource(tensors, lambda pieces: _fill(path, pieces, part))


def open_index(path: Path) -> WeightsSource:
    """A model in several safetensors files, beside the index `path` that maps tensors to files.

    Raises CheckpointError for a malformed index, or for a file that lacks a tensor of the index.
    """
    with path.open("rb") as raw:
        content = raw.read(SMALL_BYTES + 1)
    try:
        if len(content) > SMALL_BYTES:
            raise ValueError(f"it has more than {SMALL_BYTES} bytes")
        places = _SafetensorsIndex.model_validate_json(content).weight_map
    except ValueError as error:  # pydantic's is one
        why = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else error
        raise CheckpointError(f"{path} has no weight_map from tensors to file names: {why}") from error
    files = {file: path.parent / file for file in places.values() if Path(file).name == file}
    sources = {file: open_safetensors(where) for file, where in files.items() if where.is_file()}
    tensors = {}
    for name, file in places.items():
        if file not in sources or name not in sources[file].tensors:
            raise CheckpointError(f"{path}: expected {name} in {file!r} beside it, but it isn't there")
        tensors[name] = sources[file].tensors[name]

    def fill(pieces: list[Piece]) -> None:
        for file, source in sources.items():
            source.fill([piece for piece in pieces if places[piece.name] == file])

    return WeightsSource(tensors, fill)


def open_torch(path: Path) -> WeightsSource:
    """Raises CheckpointError for anything but a state dict: parameter names with their tensors."""
    _check_file(path)
    try:
        # Memory-mapped, so that a rank reads only its part. Files of the oldest layout are no zip and can't be mapped.
        content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError:
        raise
    except Exception as error:  # torch raises nearly anything here
        # Its first lines advise to turn the safety off; the reason follows a marker.
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path} isn't a file of tensors that torch.load accepts: {reason}") from error
    content, place = _state_dict(path, content)
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
            f"{path}: its tensors claim {told} bytes, but the file has {there}: they repeat values (Tensor.expand); "
            "save them with Tensor.contiguous()"
        )
    return WeightsSource(
        tensors,
        lambda pieces: _fill(path, pieces, lambda piece: content[piece.name][_slices(piece)]),
        lambda: _check_records(path),
        (f"the state dict is at {place}",) if place else (),
    )


def _state_dict(path: Path, content: Any) -> tuple[dict[str, Tensor], str]:
    """The state dict in what torch.load gave, and its place: training programs save it beside other things."""
    found = list(_state_dicts(content, ()))
    named = [one for one in found if set(one[1]) <= _STATE_DICTS]
    if len(found) == 1 or len(named) == 1:
        state, place = (named or found)[0]
        return state, shown(".".join(place)) if place else ""
    if found:
        places = ", ".join(shown(".".join(place)) for _, place in found[:5])
        raise CheckpointError(f"{path} holds several state dicts, {places}; torch.save the one that you mean alone")
    what = shown(list(content)[:3]) if isinstance(content, dict) else type(content).__name__
    raise CheckpointError(f"{path} holds {what}, expected a state dict: parameter names with their tensors")


def _state_dicts(content: Any, place: tuple[str, ...]) -> Iterator[tuple[dict[str, Tensor], tuple[str, ...]]]:
    """The state dicts in dicts of dicts; what belongs to an optimizer is none."""
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content) or len(place) > _DEEPEST:
        return
    if (content and all(isinstance(value, Tensor) for value in content.values())) or (not place and not content):
        yield content, place
        return
    for name, value in content.items():
        yield from _state_dicts(value, (*place, name))


def _check_file(path: Path) -> None:
    """Refuse a crafted file on which torch.load would never end."""
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
    """A file that refuses reads larger than a table may be."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            size = os.fstat(self.fileno()).st_size - self.tell()
        if size > _MOST_HEADER:
            raise CheckpointError(f"it claims a table of {size} bytes")
        return super().read(size)


def _check_oldest_layout(path: Path) -> None:
    """Check the five pickles in front of the values."""
    with path.open("rb") as file:
        raw = file.read(_MOST_HEADER)
    at = 0
    try:
        for _ in range(5):
            at = check_pickle(raw, at)
    except CheckpointError as error:
        raise CheckpointError(f"{path} isn't a file of tensors that torch.load accepts: {error}") from error


def _check_records(path: Path) -> None:
    """Check the CRC-32 of each record; a file of the oldest layout is no zip and has none."""
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
    """Why a tensor is no plain rectangle of numbers; None if it is."""
    if tensor.is_nested or tensor.is_meta:
        return "nested" if tensor.is_nested else "meta"
    if tensor.layout != torch.strided:
        return str(tensor.layout)
    return str(tensor.dtype) if tensor.is_quantized else None


def _check_name(path: Path, name: str) -> None:
    """Refuse names that hpctrain's checkpoints refuse, too: they are printed on terminals."""
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
