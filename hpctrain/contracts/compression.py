"""The slot `compression`: sums of gradient buckets that send fewer bytes; with the buckets and sums that strategies ask for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor

from hpctrain.base.errors import UsageError
from hpctrain.contracts.pieces import Piece
from hpctrain.contracts.plugin import Options, Plugin

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

    told: the spans; None where the sharding strategy does not give them (`Sharding.tells_spans`).
    """

    told: list[Span] | None
    numel: int
    dtype: torch.dtype
    device: torch.device

    @property
    def spans(self) -> list[Span]:
        """The spans. Raises UsageError where nobody has given them: a compression by parameter would send nothing."""
        if self.told is None:
            raise UsageError(
                "[compression] goes by parameter, but this sharding strategy does not say which are in a bucket; use stage = 2 or "
                'less, or name = "bf16"'
            )
        return self.told


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


class CompressionOptions(Options):
    """The option that every lossy compression has; the trainer itself acts on it."""

    start_step: int = Field(default=0, ge=0, description="number of first steps whose gradients travel whole")


class Compression(Plugin):
    """The form in which gradients travel. A direct subclass sends them unchanged; others derive from LossyCompression."""


class LossyCompression(Compression):
    """Sends fewer bytes than the gradients have, in the sum over all data-parallel ranks; with replicas, in that over replicas."""

    Options = CompressionOptions
    options: CompressionOptions

    @abstractmethod
    def compressor(self, bucket: GradientBucket, group: dist.ProcessGroup) -> Compressor:
        """The compressor of a bucket. Called once for each bucket, on all ranks of `group`; must not communicate."""


class Compressor(ABC):
    """Sums one bucket in each step. All ranks of the group make the same calls in the same order.

    On CPU ranks, the sums of all buckets run one after another on a thread of their own, beside backward, so each may use
    several collectives of `group` and wait for them.
    """

    def __init__(self, bucket: GradientBucket, group: dist.ProcessGroup) -> None:
        self.bucket, self.group = bucket, group

    @abstractmethod
    def all_reduce(self, gradients: Tensor, scale: float) -> None:
        """Leave the sum over the group in the flat `gradients`, (numel,), bit-equal on all of its ranks.

        They are gradients times `scale`: the loss scale, which changes between steps, or 1. Where a rank has a gradient that
        is not finite, the sum must not be finite either, so that all ranks skip the step.
        """

    def reduce_scatter(self, output: Tensor, gradients: Tensor, scale: float) -> None:
        """Reduce as all_reduce does, but only this rank's equal slice of the sum is needed, in `output`.

        `output` may be that slice of `gradients` itself, whose content is undefined afterwards.
        """
        self.all_reduce(gradients, scale)  # sends more than a slice needs: override it where less will do
        mine = gradients.view(self.group.size(), -1)[self.group.rank()]
        if mine.data_ptr() != output.data_ptr():  # a copy onto itself would cost its time
            output.copy_(mine)

    def state(self) -> list[Tensor]:
        """The tensors that last from step to step. After a skipped step, the trainer restores their values from before it."""
        return []

    def consolidate(self) -> None:
        """Bring the state into the form of `pieces`, before a checkpoint is written. Collective.

        Training goes on from that form, as it does after a restore, so a resumed run equals an uninterrupted one.
        """
        return

    def pieces(self) -> list[Piece]:
        """The live tensors of the state, to be saved after `consolidate`, or to be filled before any step.

        Names are like "residual/NAME", with the parameter's. Pieces that a checkpoint lacks, or has in another shape, keep
        their first values.
        """
        return []
