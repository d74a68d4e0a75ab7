"""What all ranks' pieces come to: the norm of the gradient, each element counted once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.contracts.pieces import Piece
from hpctrain.exchange import gather_values
from hpctrain.torch_private import foreach_norm

_CHUNK = 4096
"""Elements that are added in their own dtype. Over whole tensors that loses 1e-4 of a float32 norm on a CPU, and as much
as the ranks cut them differently; in float64 from the first element on it takes ten times as long."""


class PieceTotals:
    """Knows which pieces this rank counts: a replica is counted by the first of the ranks that hold it."""

    def __init__(self, pieces: Sequence[Piece], mesh: DeviceMesh) -> None:
        """Collective: all must know alike whether any rank holds a mere part of something."""
        cut = torch.tensor(int(any(piece.axes for piece in pieces)))
        dist.all_reduce(cut, dist.ReduceOp.MAX)
        self._cut = bool(cut)
        first = {axis for axis in mesh.mesh_dim_names or () if mesh.get_local_rank(axis) == 0}
        elsewhere = set(mesh.mesh_dim_names or ()) - first
        self._counts = [not self._cut or elsewhere <= set(piece.axes) for piece in pieces]

    def norm(self, gradients: Sequence[Tensor]) -> float:
        """The 2-norm of `gradients`, one for each piece. Collective where pieces differ between ranks; equal on all."""
        mine = [gradient for gradient, counts in zip(gradients, self._counts, strict=True) if counts]
        square = _sum_of_squares(mine) if mine else torch.zeros((), dtype=torch.float64)
        if self._cut:
            dist.all_reduce(square)
        return float(square.sqrt())

    def merged(self, numbers: dict[str, Any]) -> dict[str, Any]:
        """The entries of all ranks' dicts, where each rank knows its own pieces only; collective like the norm."""
        if not self._cut:
            return numbers
        return {key: value for one in gather_values(numbers) for key, value in one.items()}


def _sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Of all elements, a float64 scalar on the CPU."""
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
