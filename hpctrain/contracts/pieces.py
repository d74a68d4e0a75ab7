"""Pieces: the one list from which norms, memory accounting, optimizer state and checkpoints are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class Piece:
    """A rectangle of a named tensor that lies on this rank.

    `name` is the one that the tensor has in the single-process model, `shape` its shape there, `offsets` where
    the rectangle begins in every dimension, and `tensor` the rectangle's live values (not a copy), of any stride.
    `axes` are the mesh axes along which ranks hold different pieces of it; along all others it is replicated.
    A replicated tensor is a piece with the whole shape on each rank that holds it, and without axes.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor
    axes: tuple[str, ...] = ()

    @staticmethod
    def whole(name: str, tensor: Tensor) -> Piece:
        """The piece that is all of `tensor`."""
        return Piece(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)

    @staticmethod
    def of(name: str, tensor: Tensor) -> Piece:
        """The piece of `tensor` that lies on this rank: a DTensor's local shard, or all of a plain tensor.

        `piece.tensor` is the plain local tensor, which may be empty, and `tensor` itself where that is plain.
        """
        if not isinstance(tensor, DTensor):
            return Piece.whole(name, tensor)
        mesh, placements = tensor.device_mesh, tensor.placements
        _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
        axes = tuple(
            axis for axis, how in zip(mesh.mesh_dim_names or (), placements, strict=True) if not how.is_replicate()
        )
        with torch.no_grad():  # else to_local() gives a new tensor with a history
            return Piece(name, tuple(tensor.shape), tuple(offsets), tensor.to_local(), axes)


@dataclass(frozen=True)
class State:
    """What a checkpoint holds: tensors by pieces, and small values (JSON: step, schedule, scaler, versions)."""

    pieces: list[Piece]
    values: dict[str, Any] = field(default_factory=dict)
