"""Pieces: the one list that norms, memory accounting, optimizer state and checkpoints read (docs/decisions/0006)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from hpctrain.base.torch_private import strided_parts

_ROW_ORDERS = "hpctrain_row_orders"


@dataclass(frozen=True)
class Piece:
    """A rectangle of a named tensor that lies on this rank.

    `name` and `shape` are those of the tensor in the single-process model, `offsets` is the rectangle's start in every
    dimension, and `tensor` has the rectangle's live values (not a copy), of any stride. `axes` are the mesh axes along
    which ranks hold different pieces of the tensor; along all others it is replicated. A replicated tensor is a piece
    with the whole shape on each rank that holds it, and without axes.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor
    axes: tuple[str, ...] = ()

    def gradient(self) -> Tensor:
        """The gradient, zeros without one."""
        return torch.zeros_like(self.tensor) if self.tensor.grad is None else self.tensor.grad

    @staticmethod
    def whole(name: str, tensor: Tensor) -> Piece:
        """The piece with all of `tensor`."""
        return Piece(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)

    @staticmethod
    def of(name: str, tensor: Tensor) -> Piece:
        """The piece of `tensor` that lies on this rank: a DTensor's local shard, or all of a plain tensor.

        `piece.tensor` is the plain local tensor, which may be empty, and `tensor` itself where that is plain.
        """
        if not isinstance(tensor, DTensor):
            return Piece.whole(name, tensor)
        mesh, placements = tensor.device_mesh, tensor.placements
        coordinate = mesh.get_coordinate()
        assert coordinate is not None, "only ranks of its mesh have a DTensor"
        offsets = offsets_of(tensor.shape, placements, tuple(mesh.shape), coordinate)
        with torch.no_grad():  # else to_local() gives a new tensor with a history
            return Piece(name, tuple(tensor.shape), offsets, tensor.to_local(), cut_axes(tensor))


def cut_axes(tensor: Tensor) -> tuple[str, ...]:
    """The mesh axes that cut a tensor; none of a plain one."""
    if not isinstance(tensor, DTensor):
        return ()
    placed = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
    return tuple(axis for axis, how in placed if not how.is_replicate())


def laid_out_like(parameter: Tensor, local: Tensor) -> Tensor:
    """This rank's part `local` as a tensor with the layout of `parameter`: a DTensor where that is one."""
    if not isinstance(parameter, DTensor):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    # shape and stride: torch would take all parts to be as large as this rank's
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def offsets_of(
    shape: Sequence[int], placements: Sequence[Placement], sizes: Sequence[int], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """The start of a rank's part of a DTensor in every dimension, on a mesh of these `sizes` at this `coordinate`.

    torch 2.13's own function gives another rank's place where one axis unevenly cuts what another has unevenly cut.
    """
    offsets = []
    for dim, length in enumerate(shape):
        begin = 0
        for axis in _cutting(dim, placements, sizes):
            each = -(-length // sizes[axis])  # as torch.chunk cuts: the last parts may be smaller, or empty
            first = min(length, each * coordinate[axis])
            begin, length = begin + first, min(each, length - first)
        offsets.append(begin)
    return tuple(offsets)


def _cutting(dim: int, placements: Sequence[Placement], sizes: Sequence[int]) -> list[int]:
    """The mesh axes that cut `dim`, in the order in which they do it."""
    order: list[int] = []
    for axis in reversed(range(len(placements))):
        how, place = placements[axis], 0
        parts_before = strided_parts(how, dim)
        if parts_before is not None:  # the inner axes that make these parts cut before it
            parts = 1
            while parts < parts_before:
                parts, place = parts * sizes[order[place]], place + 1
        elif not how.is_shard(dim):
            continue
        order.insert(place, axis)
    return order


Run = tuple[int, int]
"""Consecutive rows: the first one, and their number."""


def set_row_order(module: nn.Module, parameter: str, runs: Sequence[Run]) -> None:
    """Declare that `parameter` of `module` holds its rows (dimension 0) in another order than the single-process model:
    as `runs` of the model's rows, one after another.

    For a Parallelism that stores together what lies apart in the model, such as a rank's rows of a fused q, k and v
    (docs/decisions/0027): the DTensor is an ordinary one, and pieces, initial values and checkpoints have the model's rows.
    """
    module.__dict__.setdefault(_ROW_ORDERS, {})[parameter] = tuple(runs)


def pieces_of(module: nn.Module, name: str, tensor: Tensor) -> list[Piece]:
    """This rank's pieces of `tensor`, the parameter or buffer `name` of `module`, in the order of its memory.

    One piece, unless `set_row_order` was called for it; then the pieces are runs of whole local rows, and none is empty.
    """
    stored = Piece.of(name, tensor)
    owner, _, attribute = name.rpartition(".")  # `set_row_order` notes it at the module that has the parameter
    runs = module.get_submodule(owner).__dict__.get(_ROW_ORDERS, {}).get(attribute)
    return [stored] if runs is None else list(_of_the_model(stored, runs))


def _of_the_model(stored: Piece, runs: Sequence[Run]) -> Iterator[Piece]:
    # begin, end: of this rank's rows in the stored order; place: of the run in that order, first: in the model's
    begin, end, place = stored.offsets[0], stored.offsets[0] + len(stored.tensor), 0
    for first, count in runs:
        low, high = max(begin, place), min(end, place + count)
        if low < high:
            offsets = (first + low - place, *stored.offsets[1:])
            yield replace(stored, offsets=offsets, tensor=stored.tensor[low - begin : high - begin])
        place += count


@dataclass(frozen=True)
class State:
    """The content of a checkpoint: tensors by pieces, and small values (JSON: step, schedule, scaler, versions)."""

    pieces: list[Piece]
    values: dict[str, Any] = field(default_factory=dict)
