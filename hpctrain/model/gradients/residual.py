"""Error feedback: what a compressed sum leaves out is added to the next one.

Stich et al., "Sparsified SGD with Memory", 2018; Karimireddy et al., "Error Feedback Fixes SignSGD", 2019.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.contracts.buckets import GradientBucket
from hpctrain.contracts.pieces import Piece


class Residual:
    """The part of a bucket that this rank has not sent yet, without loss scaling. For compressors with error feedback.

    Only the sum over the ranks matters: it is what the parameters still lack. Checkpoints have that sum, so it loads into any
    number of ranks. It is given to one rank, parameter by parameter in turns: to divide it would round, and need a copy.
    """

    def __init__(self, bucket: GradientBucket, group: dist.ProcessGroup) -> None:
        self._bucket, self._group = bucket, group
        self.flat = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)

    def add_to(self, gradients: Tensor, scale: float) -> None:
        """Add what is left from before to the flat gradients of this step, which are multiplied by `scale`."""
        gradients.add_(self.flat, alpha=scale)

    def unscale(self, scale: float) -> None:
        """`flat` has been filled with what is left now, multiplied by `scale`."""
        if scale != 1.0:
            self.flat.mul_(1.0 / scale)

    def consolidate(self) -> None:
        """Bring the sum over the ranks of each parameter to one of them; collective over the group."""
        dist.all_reduce(self.flat, group=self._group)
        for number, span in enumerate(self._bucket.spans):
            if not self._owns(number):
                span.view(self.flat).zero_()

    def pieces(self) -> list[Piece]:
        """This rank's pieces after `consolidate`, named residual/NAME."""
        return [
            replace(span.piece, name=f"residual/{span.piece.name}", tensor=span.view(self.flat))
            for number, span in enumerate(self._bucket.spans)
            if self._owns(number)
        ]

    def _owns(self, number: int) -> bool:
        return number % self._group.size() == self._group.rank()
