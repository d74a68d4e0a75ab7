"""The small values of a checkpoint, in the JSON of hpctrain.api.encode_value; checks of a piece against a saved tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hpctrain.api import CheckpointError, Piece, decode_value, shown
from hpctrain.api import encode_value as encode

__all__ = ["check_fits", "check_printable", "decode", "decode_all", "encode", "is_alike"]


def decode(value: Any) -> Any:
    """The value behind a result of `encode`; CheckpointError for other JSON."""
    try:
        return decode_value(value)
    except ValueError as error:
        raise CheckpointError(f"its {error}") from error


def decode_all(value: Any) -> dict[str, Any]:
    """All of a checkpoint's values; CheckpointError when they aren't a mapping by names."""
    plain = decode(value)
    if not isinstance(plain, dict) or not all(isinstance(name, str) and name.isprintable() for name in plain):
        raise CheckpointError("its values are no object with plain names for keys")
    return plain


def check_fits(where: Path, piece: Piece, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises CheckpointError unless the saved tensor of this shape and dtype, found in `where`, is the piece's."""
    if shape != tuple(piece.shape):
        raise CheckpointError(f"{where}: tensor {piece.name} has the shape {list(shape)}, expected {list(piece.shape)}")
    if not is_alike(dtype, piece.tensor.dtype):
        raise CheckpointError(
            f"{where}: tensor {piece.name} is {dtype}, which can't be converted to {piece.tensor.dtype}"
        )


def is_alike(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether values of one dtype can become the other's. Integers and floats can't: that would be a mistake."""
    numbers = saved.is_floating_point or saved.is_complex or saved == torch.bool
    return torch.can_cast(saved, wanted) and (numbers or not (wanted.is_floating_point or wanted.is_complex))


def check_printable(name: str) -> None:
    """Raises CheckpointError for a name that would control the terminal that shows it, or that can't be shown at all."""
    if not name or not name.isprintable():
        raise CheckpointError(f"{shown(name)} can't name a saved tensor: expected printable characters")
