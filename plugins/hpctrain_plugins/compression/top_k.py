"""`top-k`: each rank sends the largest elements of its gradients, and keeps the rest for later.

Stich et al., "Sparsified SGD with Memory", 2018; Lin et al., "Deep Gradient Compression", 2018. The elements are chosen
per parameter: with tensor parallelism, ranks hold the same parameter in different buckets and must choose the same elements.
"""

from __future__ import annotations

from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.api import (
    Compression,
    CompressionOptions,
    Compressor,
    Field,
    GradientBucket,
    LossyCompression,
    Piece,
    Plan,
    Problem,
    Residual,
    hookimpl,
)


class TopKOptions(CompressionOptions):
    ratio: float = Field(
        default=0.01, gt=0, le=1, description="fraction of each parameter's elements to send, at least one element"
    )


class TopK(LossyCompression):
    """Send the largest elements of each parameter's gradient, with their indices; error feedback."""

    name = "top-k"
    Options = TopKOptions
    options: TopKOptions

    def problems(self, plan: Plan) -> list[Problem]:
        if plan.sharding.tells_spans:
            return []
        why = (
            f"sharding {plan.sharding.name} does not say which parameters are in a bucket, and the residual is kept by "
            'parameter; use stage = 2 or less, or name = "bf16"'
        )
        return [Problem(why)]

    def compressor(self, bucket: GradientBucket, group: dist.ProcessGroup) -> Compressor:
        return TopKCompressor(bucket, group, self.options.ratio)


class TopKCompressor(Compressor):
    """Sends values and indices, (count,) each, in one all-gather of bytes. Each rank adds them in rank order."""

    def __init__(self, bucket: GradientBucket, group: dist.ProcessGroup, ratio: float) -> None:
        super().__init__(bucket, group)
        self._counts = [ceil(ratio * span.numel) for span in bucket.spans]
        self._residual = Residual(bucket, group)
        self._place = torch.int32 if bucket.numel < 2**31 else torch.int64

    def all_reduce(self, gradients: Tensor, scale: float) -> None:
        self._residual.add_to(gradients, scale)
        places = self._largest(gradients)
        values = gradients[places]
        self._residual.flat.copy_(gradients)
        self._residual.flat[places] = 0
        self._residual.unscale(scale)
        gradients.zero_()
        for one_values, one_places in self._exchange(values, places):
            # a rank sends no index twice, so additions happen in rank order
            gradients.index_add_(0, one_places, one_values)

    def _largest(self, gradients: Tensor) -> Tensor:
        """The indices in the bucket of the largest gradients: (count,) int64. NaN and infinity count as the largest, so they
        are sent."""
        # cat needs a tensor even if a rank's slice of a bucket is only padding
        found = [torch.empty(0, dtype=torch.int64, device=gradients.device)]
        for span, count in zip(self.bucket.spans, self._counts, strict=True):
            magnitudes = gradients[span.begin : span.begin + span.numel].abs()
            found.append(magnitudes.topk(count, sorted=False).indices + span.begin)
        return torch.cat(found)

    def _exchange(self, values: Tensor, places: Tensor) -> list[tuple[Tensor, Tensor]]:
        """All ranks' values and indices, in rank order."""
        sent = torch.cat([values.view(torch.uint8), places.to(self._place).view(torch.uint8)])
        ranks = self.group.size()
        received = sent.new_empty(ranks, len(sent))
        dist.all_gather_single(received.view(-1), sent, group=self.group)
        cut = values.nbytes
        # clones are aligned for their dtype
        return [(one[:cut].clone().view(values.dtype), one[cut:].clone().view(self._place)) for one in received]

    def state(self) -> list[Tensor]:
        return [self._residual.flat]

    def consolidate(self) -> None:
        self._residual.consolidate()

    def pieces(self) -> list[Piece]:
        return self._residual.pieces()


@hookimpl
def hpctrain_compression() -> list[type[Compression]]:
    return [TopK]
