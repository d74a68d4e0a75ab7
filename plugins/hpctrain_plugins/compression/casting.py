"""`none` sends gradients as they are; `bf16` and `fp16` send them in 16 bits."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.api import Compression, Compressor, GradientBucket, LossyCompression, hookimpl


class Plain(Compression):
    """Send gradients as they are."""

    name = "none"


class _Cast(Compressor):
    """Half the bytes of float32 on the wire."""

    def __init__(self, bucket: GradientBucket, group: dist.ProcessGroup, wire: torch.dtype) -> None:
        super().__init__(bucket, group)
        self._wire = wire

    def all_reduce(self, gradients: Tensor, scale: float) -> None:
        sent = gradients.to(self._wire)
        dist.all_reduce(sent, group=self.group)
        gradients.copy_(sent)

    def reduce_scatter(self, output: Tensor, gradients: Tensor, scale: float) -> None:
        sent = gradients.to(self._wire)
        mine = sent.view(self.group.size(), -1)[self.group.rank()]
        dist.reduce_scatter_single(mine, sent, group=self.group)
        output.copy_(mine)


class _Casting(LossyCompression):
    wire: ClassVar[torch.dtype]

    def compressor(self, bucket: GradientBucket, group: dist.ProcessGroup) -> Compressor:
        return _Cast(bucket, group, self.wire)


class BFloat16(_Casting):
    """Send gradients as bfloat16: the range of float32, 8 bits of precision."""

    name = "bf16"
    wire = torch.bfloat16


class Float16(_Casting):
    """Send gradients as float16: 11 bits of precision, values above 65504 overflow."""

    name = "fp16"
    wire = torch.float16


@hookimpl
def hpctrain_compression() -> list[type[Compression]]:
    return [Plain, BFloat16, Float16]
