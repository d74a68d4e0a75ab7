"""Whether a piece can be filled from what a checkpoint holds, and whether a tensor's name can be shown."""

from __future__ import annotations

from pathlib import Path

import torch

from hpctrain.api import CheckpointError, Piece, shown


def check_fits(where: Path, piece: Piece, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises CheckpointError unless the saved tensor of this shape and dtype, found in `where`, is the piece's."""
    if shape != tuple(piece.shape):
        raise CheckpointError(f"{where}: tensor {piece.name} has the shape {list(shape)}, expected {list(piece.shape)}")
    if not is_alike(dtype, piece.tensor.dtype):
        raise CheckpointError(
            f"{where}: tensor {piece.name} is {dtype}, which can't be converted to {piece.tensor.dtype}"
        )


def is_alike(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether values of one dtype can become the other's. Integers cannot become floats or the reverse: that is a mistake."""
    numbers = saved.is_floating_point or saved.is_complex or saved == torch.bool
    return torch.can_cast(saved, wanted) and (numbers or not (wanted.is_floating_point or wanted.is_complex))


def check_printable(name: str) -> None:
    """CheckpointError for a name that would control the terminal that shows it, or that can't be shown at all."""
    if not name or not name.isprintable():
        raise CheckpointError(f"{shown(name)} can't name a saved tensor: expected printable characters")
