"""Whole tensors for optimizers that need them: each is put together, and computed with, on one of the ranks that hold its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.errors import UsageError
from hpctrain.base.torch_private import flatten_mesh
from hpctrain.contracts.optimization import WholeTensors
from hpctrain.contracts.pieces import Piece
from hpctrain.model.mesh import Meshes
from hpctrain.ranks.json_collectives import gather_values


@dataclass(frozen=True)
class _Part:
    """A rectangle of a tensor on one rank."""

    name: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]

    @property
    def place(self) -> tuple[slice, ...]:
        """The slices of the whole that it fills."""
        return tuple(slice(at, at + n) for at, n in zip(self.offsets, self.shape, strict=True))


@dataclass(frozen=True)
class _Exchange:
    """Ranks that hold parts of the same tensors of one dtype. held: this rank's parts, by the ranks that own their tensors. owned:
    each rank's parts of the tensors that this rank owns."""

    group: dist.ProcessGroup
    dtype: torch.dtype
    held: list[list[_Part]]
    owned: list[list[_Part]]


class OwnedTensors(WholeTensors):
    """Whole tensors of which ranks hold `pieces`. The first call of all ranks agrees on the owners. device: for communication."""

    def __init__(self, pieces: Sequence[Piece], meshes: Meshes, device: torch.device) -> None:
        self._meshes, self._device = meshes, device
        # what is whole here needs nobody else, such as the replicas of local SGD
        self._cut = {id(piece.tensor): _part_of(piece) for piece in pieces if piece.tensor.shape != piece.shape}
        self._exchanges: list[_Exchange] | None = None

    def map(
        self, tensors: Sequence[Tensor], values: Sequence[Tensor], function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        if self._exchanges is None:
            self._exchanges = self._agree()
        parts = [self._cut.get(id(tensor)) for tensor in tensors]
        asked = {part: value for part, value in zip(parts, values, strict=True) if part is not None}
        names = {part.name for part in asked}
        found: dict[_Part, Tensor] = {}
        for exchange in self._exchanges:
            found |= self._mapped(exchange, names, asked, function)
        return [
            function(value) if part is None else found[part].to(value.device)
            for part, value in zip(parts, values, strict=True)
        ]

    def _mapped(
        self, exchange: _Exchange, names: Set[str], asked: Mapping[_Part, Tensor], function: Callable[[Tensor], Tensor]
    ) -> dict[_Part, Tensor]:
        """The parts of this rank, of the tensors with these names."""
        held = [[part for part in parts if part.name in names] for parts in exchange.held]
        owned = [[part for part in parts if part.name in names] for parts in exchange.owned]
        received = self._swap(exchange, [[asked[part] for part in parts] for parts in held], owned)
        wholes: dict[str, Tensor] = {}
        for part, value in received.items():
            whole = wholes.setdefault(part.name, torch.empty(part.whole, dtype=exchange.dtype, device=self._device))
            whole[part.place] = value
        results = {name: function(whole) for name, whole in wholes.items()}  # once for each tensor, on its owner alone
        return self._swap(exchange, [[results[part.name][part.place] for part in parts] for parts in owned], held)

    def _swap(self, exchange: _Exchange, sent: list[list[Tensor]], awaited: list[list[_Part]]) -> dict[_Part, Tensor]:
        """Send each rank its tensors, and receive the parts that each rank sends here. Collective over the group."""
        flat = [tensor.to(self._device, exchange.dtype).reshape(-1) for tensors in sent for tensor in tensors]
        given = torch.cat(flat) if flat else torch.empty(0, dtype=exchange.dtype, device=self._device)
        sizes = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        counts = [sum(prod(part.shape) for part in parts) for parts in awaited]
        taken = torch.empty(sum(counts), dtype=exchange.dtype, device=self._device)
        dist.all_to_all_single(taken, given, counts, sizes, group=exchange.group)
        parts = [part for parts in awaited for part in parts]
        pieces = torch.split(taken, [prod(part.shape) for part in parts])
        return {part: piece.view(part.shape) for part, piece in zip(parts, pieces, strict=True)}

    def _agree(self) -> list[_Exchange]:
        """The exchanges in which this rank has a part. Collective over all ranks."""
        parts: dict[tuple[str, ...], list[_Part]] = {}
        for part in self._cut.values():
            parts.setdefault(part.axes, []).append(part)
        kinds = sorted({tuple(axes) for of_rank in gather_values([list(axes) for axes in parts]) for axes in of_rank})
        names = self._meshes.model.mesh_dim_names or ()
        exchanges = []
        for axes in kinds:
            if not set(axes) <= set(names):
                raise UsageError(
                    f"[optimizer]: it needs whole parameters, but some are cut along {', '.join(axes)}, whose ranks have "
                    "parameters of their own; use another optimizer, such as adamw, or leave that axis out"
                )
            mesh = self._meshes.model[tuple(name for name in names if name in axes)]
            group = (mesh if mesh.ndim == 1 else flatten_mesh(mesh, "_".join(axes))).get_group()
            of_ranks = gather_values([[*vars(part).values()] for part in parts.get(axes, [])], group)
            everyone = [[_part_from(fields) for fields in of_rank] for of_rank in of_ranks]
            owners, me = _owners(everyone), group.rank()
            for dtype in sorted({part.dtype for of_rank in everyone for part in of_rank}):
                alike = [[part for part in of_rank if part.dtype == dtype] for of_rank in everyone]
                held = [[part for part in alike[me] if owners[part.name] == rank] for rank in range(group.size())]
                owned = [[part for part in of_rank if owners[part.name] == me] for of_rank in alike]
                exchanges.append(_Exchange(group, getattr(torch, dtype), held, owned))
        return exchanges


def _part_of(piece: Piece) -> _Part:
    dtype = str(piece.tensor.dtype).removeprefix("torch.")
    return _Part(piece.name, tuple(piece.shape), tuple(piece.offsets), tuple(piece.tensor.shape), dtype, piece.axes)


def _part_from(fields: Sequence[Any]) -> _Part:
    name, whole, offsets, shape, dtype, axes = fields
    return _Part(name, tuple(whole), tuple(offsets), tuple(shape), dtype, tuple(axes))


def _owners(parts: Sequence[Sequence[_Part]]) -> dict[str, int]:
    """The rank of each tensor, one that holds a part of it. Large tensors first, each to the rank that has least so far."""
    holders: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for rank, of_rank in enumerate(parts):
        for part in of_rank:
            sizes[part.name] = prod(part.whole)
            if rank not in holders.setdefault(part.name, []):
                holders[part.name].append(rank)
    load = [0] * len(parts)
    owners = {}
    for name in sorted(holders, key=lambda name: (-sizes[name], name)):  # by name, too: all ranks agree
        owners[name] = min(holders[name], key=lambda rank: load[rank])
        load[owners[name]] += sizes[name]
    return owners
