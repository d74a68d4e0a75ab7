"""Totals over the pieces of all ranks: the gradient norm, with each element counted once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.torch_private import foreach_norm
from hpctrain.contracts.pieces import Piece
from hpctrain.model.mesh import Meshes
from hpctrain.ranks.json_collectives import gather_values

_CHUNK = 4096
"""Elements that are added in their own dtype before float64 takes over. Adding whole tensors in float32 on a CPU has errors
of 1e-4 of the norm, and layouts differ by as much. Adding everything in float64 takes ten times as long."""


class PieceTotals:
    """Knows the pieces that this rank counts: the first rank that holds a replica counts it."""

    def __init__(self, pieces: Sequence[Piece], meshes: Meshes) -> None:
        """Collective: all ranks must agree on whether any rank holds only a part of a tensor."""
        cut = torch.tensor(int(any(piece.axes for piece in pieces)))
        dist.all_reduce(cut, dist.ReduceOp.MAX)
        self._cut = bool(cut)
        firsts = {axes: meshes.counts(axes) for axes in {piece.axes for piece in pieces}}
        self._counts = [not self._cut or firsts[piece.axes] for piece in pieces]

    def norm(self, gradients: Sequence[Tensor]) -> float:
        """The 2-norm of `gradients`, one tensor per piece; equal on all ranks. Collective if pieces differ between ranks."""
        mine = [gradient for gradient, counts in zip(gradients, self._counts, strict=True) if counts]
        square = _sum_of_squares(mine) if mine else torch.zeros((), dtype=torch.float64)
        if self._cut:
            dist.all_reduce(square)
        return float(square.sqrt())

    def merged(self, numbers: dict[str, Any]) -> dict[str, Any]:
        """The merged dicts of all ranks, each with the entries of its own pieces. Collective like the norm."""
        if not self._cut:
            return numbers
        return {key: value for one in gather_values(numbers) for key, value in one.items()}


def _sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum over all elements, a float64 scalar on the CPU."""
    norms, rests = [], []
    for tensor in tensors:
        flat = tensor.reshape(-1)
        even = len(flat) // _CHUNK * _CHUNK
        if even:
            norms.append(torch.linalg.vector_norm(flat[:even].view(-1, _CHUNK), dim=1))
        if even < len(flat):
            rests.append(flat[even:])
    norms += [norm.view(1) for norm in foreach_norm(rests)] if rests else []
    return torch.cat([norm.double() for norm in norms]).square().sum().cpu()
