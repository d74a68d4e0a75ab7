"""Puts a parameter together from the pieces of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.errors import UsageError
from hpctrain.contracts.pieces import Piece
from hpctrain.model.mesh import Meshes
from hpctrain.ranks.json_collectives import gather_values


class FullParameters:
    """Full tensors of the trained parameters with these `shapes`, of which this rank has `pieces`."""

    def __init__(
        self, pieces: Sequence[Piece], shapes: Mapping[str, tuple[int, ...]], meshes: Meshes, device: torch.device
    ) -> None:
        self._shapes, self._meshes, self._device = shapes, meshes, device
        self._pieces: dict[str, list[Piece]] = {}
        self._kinds: dict[str, tuple[str, tuple[str, ...]]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece.name, []).append(piece)

    def _kind(self, name: str) -> tuple[str, tuple[str, ...]]:
        """The dtype and the axes of a parameter, which a rank without a piece of it does not know. Collective."""
        if name not in self._kinds:
            found = self._pieces.get(name)
            mine = (str(found[0].tensor.dtype), found[0].axes) if found else None
            known = [kind for kind in gather_values(mine) if kind is not None]
            self._kinds[name] = known[0] if known else ("torch.float32", ())  # one without elements has no piece
        return self._kinds[name]

    def of(self, name: str, values: Callable[[Piece], Tensor]) -> Tensor:
        """The whole of what `values` gives for each piece of the parameter, on every rank. Collective over all ranks.

        Where several ranks have values of their own in one place, as between the averages of local SGD, it is their mean.
        Raises UsageError for a name that no trained parameter has.
        """
        if name not in self._shapes:
            raise UsageError(f"{name!r} is no trained parameter of the model", everywhere=True)
        shape = self._shapes[name]
        dtype, axes = self._kind(name)
        whole = torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=self._device)
        held = torch.tensor(sum(piece.tensor.numel() for piece in self._pieces.get(name, [])), device=self._device)
        for piece in self._pieces.get(name, []):
            place = tuple(slice(at, at + n) for at, n in zip(piece.offsets, piece.tensor.shape, strict=True))
            whole[place] = values(piece).detach()
        numbers = torch.view_as_real(whole) if whole.is_complex() else whole
        for axis in axes:
            group = self._meshes.group(axis, axes)
            if group.size() > 1:
                dist.all_reduce(numbers, group=group)  # where a rank has no piece, it adds zeros
                dist.all_reduce(held, group=group)
        copies = held.item() / max(1, whole.numel())
        return whole / copies if copies > 1 else whole
