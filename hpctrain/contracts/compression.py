"""The slot `compression`: sums of gradient buckets that send fewer bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch.distributed as dist
from pydantic import Field
from torch import Tensor

from hpctrain.contracts.buckets import GradientBucket
from hpctrain.contracts.pieces import Piece
from hpctrain.contracts.plugin import Options, Plugin


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
        self.all_reduce(gradients, scale)
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
