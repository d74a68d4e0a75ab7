"""Flat buckets of gradients, and their sums over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.contracts.pieces import Piece

Finish = Callable[[], None]
"""Waits for a sum that has begun."""


@dataclass(frozen=True)
class Span:
    """A parameter, or a rectangle of one, in a flat bucket: its elements in row-major order from `begin` on.

    Use the shape of `piece.tensor` only: its values are the parameter's, not gradients.
    """

    piece: Piece
    begin: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.piece.tensor.numel()

    def view(self, flat: Tensor) -> Tensor:
        """The span's part of a flat tensor, in the rectangle's shape."""
        return flat[self.begin : self.begin + self.numel].view(self.piece.tensor.shape)


@dataclass(frozen=True)
class GradientBucket:
    """The layout of a flat bucket of gradients, equal on all ranks that sum it. Elements of no span are zeros.

    `spans` is empty where the sharding strategy does not give them (`Sharding.tells_spans`).
    """

    spans: list[Span]
    numel: int
    dtype: torch.dtype
    device: torch.device


class BucketSum(Protocol):
    """Sums one bucket over one data axis, step after step."""

    def all_reduce(self, gradients: Tensor) -> Finish:
        """Begin to sum the flat `gradients`; the returned function waits and leaves the sum there."""

    def reduce_scatter(self, output: Tensor, gradients: Tensor) -> Finish:
        """Begin to sum the flat `gradients`, and leave this rank's equal slice of the sum in `output`.

        `output` may be that slice of `gradients` itself, whose content is undefined afterwards.
        """


class GradientSums(Protocol):
    """The source of a sharding strategy's sums, which are compressed as the job says."""

    def group(self, axis: str, piece_axes: Sequence[str]) -> dist.ProcessGroup:
        """The ranks of the data axis `axis` that sum a parameter whose pieces have the axes `piece_axes`.

        These are all ranks of the axis, unless `piece_axes` has one with `AxisTraits.has_own_parameters`.
        """

    def bucket(self, content: GradientBucket, axis: str) -> BucketSum:
        """The sum of such a bucket over `axis`. All its ranks ask for the same buckets in the same order.

        The pieces in a bucket have the same `axes`, which choose the group as in `group`.
        """
