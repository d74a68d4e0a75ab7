"""The pieces of all ranks together: full parameters, and totals with each element counted once, such as the gradient norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.devices import is_accelerator
from hpctrain.base.errors import UsageError
from hpctrain.base.torch_private import foreach_norm
from hpctrain.contracts.pieces import Piece
from hpctrain.model.mesh import Meshes
from hpctrain.ranks.json_collectives import gather_values

# elements that are added in their own dtype before float64 takes over: whole tensors in float32 on a CPU have errors of 1e-4 of
# the norm, and layouts differ by as much. Float64 alone takes ten times as long, but for tensors with as few elements as _SMALL.
_CHUNK, _SMALL = 4096, 16384


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
            raise UsageError(f"{name!r} is no trained parameter of the model")
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


class PieceTotals:
    """Knows the pieces that this rank counts: the first rank that holds a replica counts it."""

    def __init__(self, pieces: Sequence[Piece], meshes: Meshes) -> None:
        """Collective: all ranks must agree on whether any rank holds only a part of a tensor."""
        cut = torch.tensor(int(any(piece.axes for piece in pieces)))
        dist.all_reduce(cut, dist.ReduceOp.MAX)
        self.cut = bool(cut)
        """Whether ranks hold parts: then their squares add up."""
        firsts = {axes: meshes.counts(axes) for axes in {piece.axes for piece in pieces}}
        self._counts = [not self.cut or firsts[piece.axes] for piece in pieces]

    def square(self, gradients: Sequence[Tensor]) -> Tensor | float:
        """The sum of the squares of `gradients`, one tensor per piece, that this rank counts: a float64 scalar on their device."""
        mine = [gradient for gradient, counts in zip(gradients, self._counts, strict=True) if counts]
        return _sum_of_squares(mine) if mine else 0.0

    def norm(self, squares: Sequence[float], rank: int) -> float:
        """The 2-norm of the full gradient on this rank, from all ranks' `square`."""
        if self.cut:
            return math.sqrt(sum(squares))
        # one that is not finite counts on all ranks: all leave out the update, or none
        return math.sqrt(next((square for square in squares if not math.isfinite(square)), squares[rank]))

    def merged(self, numbers: dict[str, Any]) -> dict[str, Any]:
        """The merged dicts of all ranks, each with the entries of its own pieces. Collective like the norm."""
        if not self.cut:
            return numbers
        return {key: value for one in gather_values(numbers) for key, value in one.items()}


def _sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum over all elements, a float64 scalar."""
    if is_accelerator(tensors[0].device):  # it adds as a tree, in a few launches
        # the norm of 16 bits has 16 bits
        short, long = ([one for one in tensors if (one.dtype.itemsize == 2) == is_short] for is_short in (True, False))
        norms = [torch.linalg.vector_norm(one, dtype=torch.float32) for one in short]
        norms += foreach_norm(long) if long else []
        return torch.stack(norms).double().square().sum()
    norms, rests = [], []
    for tensor in tensors:
        rest = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if rest.numel() > _SMALL:
            flat, dtype = rest.reshape(-1), torch.float32 if rest.dtype.itemsize == 2 else None
            even = len(flat) // _CHUNK * _CHUNK
            norms.append(torch.linalg.vector_norm(flat[:even].view(-1, _CHUNK), dim=1, dtype=dtype).double())
            rest = flat[even:]
        rests.append(rest)
    of_rests = torch.stack(foreach_norm(rests, 2, torch.float64))
    return (torch.cat([*norms, of_rests]) if norms else of_rests).square().sum()
