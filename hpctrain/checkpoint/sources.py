"""Reads tensors from safetensors files, one or several, and has what all files of other programs need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from hpctrain.base.errors import CheckpointError
from hpctrain.base.safe_files import SMALL_BYTES
from hpctrain.contracts.checkpoint import StoredTensor
from hpctrain.contracts.pieces import Piece

SAFETENSORS_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip
"""safetensors' names of dtypes."""
_MOST_HEADER = 32 * 2**20  # bytes of a file's table of tensors; 10,000 tensors take a megabyte


class _SafetensorsIndex(BaseModel):
    """*.safetensors.index.json."""

    weight_map: dict[str, str]


@dataclass(frozen=True)
class WeightsSource:
    """`tensors` by name, and `fill`, which copies their values into pieces with these names.

    `check` verifies all values that `fill` would trust; one rank's call is enough. It raises CheckpointError for damage.
    remarks: sentences for the user about how the tensors were found.
    """

    tensors: Mapping[str, StoredTensor]
    fill: Callable[[list[Piece]], None]
    check: Callable[[], None] = lambda: None
    remarks: tuple[str, ...] = ()

    def renamed(self, names: Mapping[str, str], *remarks: str) -> WeightsSource:
        """The tensors under other names: `names` maps each new name to the stored one. Those that it lacks are left out."""

        def fill(pieces: list[Piece]) -> None:
            self.fill([replace(piece, name=names[piece.name]) for piece in pieces])

        tensors = {name: self.tensors[stored] for name, stored in names.items()}
        return WeightsSource(tensors, fill, self.check, (*self.remarks, *remarks))


def open_safetensors(path: Path) -> WeightsSource:
    """The tensors of a safetensors file. Raises CheckpointError for one that isn't whole, or for an unsupported dtype."""
    from safetensors import SafetensorError, safe_open  # here: most jobs read no such file

    dtypes = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
    tensors = {}
    with path.open("rb") as raw:  # safe_open reports any file that it can't read as missing
        length = int.from_bytes(raw.read(8), "little")
        if length > _MOST_HEADER:  # safe_open itself takes up to 100 MB
            raise CheckpointError(f"{path} isn't a whole safetensors file: its header has {length} bytes")
    try:
        file: Any = safe_open(path, framework="pt")
        for name in file.keys():  # noqa: SIM118 - no mapping
            check_name(path, name)
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
        return file.get_slice(piece.name)[slices_of(piece)]  # type: ignore[no-any-return]  # reads only these rows

    return WeightsSource(tensors, lambda pieces: fill_pieces(path, pieces, part))


def open_index(path: Path) -> WeightsSource:
    """A model in several safetensors files, beside the index `path` that maps tensors to files.

    Raises CheckpointError for a malformed index, or for a file that lacks a tensor of the index.
    """
    with path.open("rb") as raw:  # not read_bytes of safe_files: weights may be links
        content = raw.read(SMALL_BYTES + 1)
    try:
        if len(content) > SMALL_BYTES:
            raise ValueError(f"it has more than {SMALL_BYTES} bytes")
        places = _SafetensorsIndex.model_validate_json(content).weight_map
    except ValueError as error:  # pydantic's is one
        why = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else error
        raise CheckpointError(f"{path} has no weight_map from tensors to file names: {why}") from error
    # files beside the index alone: an index of another person's must not name one elsewhere
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


def check_name(path: Path, name: str) -> None:
    """Refuse names that hpctrain's checkpoints refuse, too: they are printed on terminals."""
    if not name.isprintable():
        raise CheckpointError(f"{path}: {name!r} can't name a tensor: expected printable characters")


def slices_of(piece: Piece) -> tuple[slice, ...]:
    """The piece's place in the whole tensor."""
    spans = zip(piece.offsets, piece.tensor.shape, strict=True)
    return tuple(slice(offset, offset + length) for offset, length in spans)


def fill_pieces(path: Path, pieces: list[Piece], part: Callable[[Piece], Tensor]) -> None:
    """Copy into each piece its `part` of the file. Raises CheckpointError for values that its dtype can't hold."""
    for piece in pieces:
        values = part(piece)
        if not torch.can_cast(values.dtype, piece.tensor.dtype):  # complex numbers into real ones, say
            raise CheckpointError(f"{path}: {piece.name} is {values.dtype}, expected {piece.tensor.dtype}")
        with torch.no_grad():
            piece.tensor.copy_(values)
