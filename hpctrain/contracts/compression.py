"""The slot `compression`: what data-parallel ranks do in place of summing a bucket of gradients."""

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

    start_step: int = Field(default=0, ge=0, description="gradients of so many first steps travel whole")


class Compression(Plugin):
    """How gradients travel. A direct subclass sends them as they are; see LossyCompression for the rest."""


class LossyCompression(Compression):
    """Sends less than the gradients are, in the sum over all data-parallel ranks; with replicas, in the sum over these."""

    Options = CompressionOptions
    options: CompressionOptions

    @abstractmethod
    def compressor(self, bucket: GradientBucket, group: dist.ProcessGroup) -> Compressor:
        """Made once for each bucket, on all ranks of `group`. Must not communicate."""


class Compressor(ABC):
    """Sums one bucket, step after step. All ranks of the group call the same in the same order.

    On CPU ranks the sums of all buckets run one after the other on a thread of their own, behind backward: so they may
    use several collectives of `group` each, and wait for them.
    """

    def __init__(self, bucket: GradientBucket, group: dist.ProcessGroup) -> None:
        self.bucket, self.group = bucket, group

    @abstractmethod
    def all_reduce(self, gradients: Tensor, scale: float) -> None:
        """Leave the sum over the group in the flat `gradients`, (numel,), bit-equal on all of its ranks.

        They are gradients times `scale`, which changes between steps (loss scaling); 1 without it. Where a rank has a
        gradient that is not finite, the sum must not be finite either, so that all ranks leave the step out.
        """

    def reduce_scatter(self, output: Tensor, gradients: Tensor, scale: float) -> None:
        """Reduce as all_reduce does, but only this rank's equal slice of the sum is needed, in `output`.

        `output` may be that slice of `gradients` itself, which hold nothing of use afterwards.
        """
        self.all_reduce(gradients, scale)
        mine = gradients.view(self.group.size(), -1)[self.group.rank()]
        if mine.data_ptr() != output.data_ptr():
            output.copy_(mine)

    def state(self) -> list[Tensor]:
        """The tensors that last from step to step. The trainer puts it back when a step is left out, as if it had not been."""
        return []

    def consolidate(self) -> None:
        """A checkpoint is about to be written: bring the state into the form that `pieces` gives; collective.

        Training goes on from that form, and so it does after a restore: a resumed run does what an uninterrupted one does.
        """
        return

    def pieces(self) -> list[Piece]:
        """The state for a checkpoint, the live tensors; asked for after `consolidate`, or before any step to be filled.

        Names are like "residual/NAME", with the parameter's. A checkpoint need not have them: those that it lacks, or has
        in another shape, stay as they were made.
        """
        return []
