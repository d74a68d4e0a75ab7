"""Whole tensors for optimizers that need them: each is put together, and computed with, on one of the ranks that hold its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

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

    @property
    def place(self) -> tuple[slice, ...]:
        """The slices of the whole that it fills."""
        return tuple(slice(at, at + n) for at, n in zip(self.offsets, self.shape, strict=True))


@dataclass(frozen=True)
class _Exchange:
    """Ranks that hold parts of the same tensors. parts: of each rank, in one order. owners: the rank of each tensor."""

    group: dist.ProcessGroup
    parts: list[list[_Part]]
    owners: dict[str, int]

    @property
    def mine(self) -> list[_Part]:
        return self.parts[self.group.rank()]


class OwnedTensors(WholeTensors):
    """Whole tensors of which ranks hold `pieces`. The first call of all ranks agrees on the owners. device: for communication."""

    def __init__(self, pieces: Sequence[Piece], meshes: Meshes, device: torch.device) -> None:
        self._meshes, self._device = meshes, device
        # a part's axes: what is whole here needs nobody else, such as the replicas of local SGD
        self._cut = {id(piece.tensor): piece for piece in pieces if piece.tensor.shape != piece.shape}
        self._exchanges: list[_Exchange] | None = None

    def map(
        self, tensors: Sequence[Tensor], values: Sequence[Tensor], function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        if self._exchanges is None:
            self._exchanges = self._agree()
        asked: dict[_Part, Tensor] = {}
        for tensor, value in zip(tensors, values, strict=True):
            if id(tensor) in self._cut:
                asked[_part_of(self._cut[id(tensor)])] = value
        found: dict[_Part, Tensor] = {}
        for exchange in self._exchanges:
            for dtype in sorted({part.dtype for parts in exchange.parts for part in parts}):
                found |= self._mapped(exchange, dtype, asked, function)
        return [
            found[_part_of(self._cut[id(tensor)])].to(value.device) if id(tensor) in self._cut else function(value)
            for tensor, value in zip(tensors, values, strict=True)
        ]

    def _mapped(
        self, exchange: _Exchange, dtype: str, asked: Mapping[_Part, Tensor], function: Callable[[Tensor], Tensor]
    ) -> dict[_Part, Tensor]:
        """The parts of this rank, of the tensors of one dtype."""
        names = {part.name for part in asked if part.dtype == dtype}
        ranks, me = range(exchange.group.size()), exchange.group.rank()
        held = [
            [part for part in exchange.mine if part.name in names and exchange.owners[part.name] == r] for r in ranks
        ]
        owned = [
            [part for part in parts if part.name in names and exchange.owners[part.name] == me]
            for parts in exchange.parts
        ]
        kind = getattr(torch, dtype)
        received = self._swap(exchange.group, kind, [[asked[part] for part in parts] for parts in held], owned)
        wholes: dict[str, Tensor] = {}
        for part, value in received.items():
            whole = wholes.setdefault(part.name, torch.empty(part.whole, dtype=kind, device=self._device))
            whole[part.place] = value
        results = {name: function(whole) for name, whole in wholes.items()}
        return self._swap(
            exchange.group, kind, [[results[part.name][part.place] for part in parts] for parts in owned], held
        )

    def _swap(
        self, group: dist.ProcessGroup, dtype: torch.dtype, sent: list[list[Tensor]], awaited: list[list[_Part]]
    ) -> dict[_Part, Tensor]:
        """Send each rank its tensors, and receive the parts that each rank sends here. Collective over `group`."""
        flat = [tensor.to(self._device, dtype).reshape(-1) for tensors in sent for tensor in tensors]
        given = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=self._device)
        sizes = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        counts = [sum(prod(part.shape) for part in parts) for parts in awaited]
        taken = torch.empty(sum(counts), dtype=dtype, device=self._device)
        dist.all_to_all_single(taken, given, counts, sizes, group=group)
        parts = [part for parts in awaited for part in parts]
        pieces = torch.split(taken, [prod(part.shape) for part in parts])
        return {part: piece.view(part.shape) for part, piece in zip(parts, pieces, strict=True)}

    def _agree(self) -> list[_Exchange]:
        """The exchanges in which this rank has a part. Collective over all ranks."""
        parts: dict[tuple[str, ...], list[_Part]] = {}
        for piece in self._cut.values():
            parts.setdefault(piece.axes, []).append(_part_of(piece))
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
            exchanges.append(_Exchange(group, everyone, _owners(everyone)))
        return exchanges


def _part_of(piece: Piece) -> _Part:
    dtype = str(piece.tensor.dtype).removeprefix("torch.")
    return _Part(piece.name, tuple(piece.shape), tuple(piece.offsets), tuple(piece.tensor.shape), dtype)


def _part_from(fields: Sequence[object]) -> _Part:
    name, whole, offsets, shape, dtype = fields
    return _Part(name, tuple(whole), tuple(offsets), tuple(shape), dtype)  # type: ignore[arg-type]


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
    for name in sorted(holders, key=lambda name: (-sizes[name], name)):
        owners[name] = min(holders[name], key=lambda rank: load[rank])
        load[owners[name]] += sizes[name]
    return owners
