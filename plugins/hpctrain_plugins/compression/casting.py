"""`none` sends gradients as they are; `bf16` and `fp16` send them in 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.api import Compression, hookimpl


class Plain(Compression):
    """Send gradients as they are."""

    name = "none"

    def all_reduce(self, bucket: Tensor, group: dist.ProcessGroup) -> Callable[[], None]:
        work = dist.all_reduce(bucket, group=group, async_op=True)
        assert work is not None
        return lambda: _wait(work)

    def reduce_scatter(self, output: Tensor, bucket: Tensor, group: dist.ProcessGroup) -> Callable[[], None]:
        work = dist.reduce_scatter_single(output, bucket, group=group, async_op=True)
        assert work is not None
        return lambda: _wait(work)


class _Casting(Compression):
    """Half the bytes of float32 on the wire."""

    wire: ClassVar[torch.dtype]

    def all_reduce(self, bucket: Tensor, group: dist.ProcessGroup) -> Callable[[], None]:
        sent = bucket.to(self.wire)
        work = dist.all_reduce(sent, group=group, async_op=True)
        assert work is not None

        def finish() -> None:
            _wait(work)
            bucket.copy_(sent)

        return finish

    def reduce_scatter(self, output: Tensor, bucket: Tensor, group: dist.ProcessGroup) -> Callable[[], None]:
        sent = bucket.to(self.wire)
        mine = sent.view(group.size(), -1)[group.rank()]
        work = dist.reduce_scatter_single(mine, sent, group=group, async_op=True)
        assert work is not None

        def finish() -> None:
            _wait(work)
            output.copy_(mine)

        return finish


class BFloat16(_Casting):
    """Send gradients as bfloat16: the range of float32, 8 bits of precision."""

    name = "bf16"
    wire = torch.bfloat16


class Float16(_Casting):
    """Send gradients as float16: 11 bits of precision, values above 65504 overflow."""

    name = "fp16"
    wire = torch.float16


def _wait(work: dist.Work) -> None:
    work.wait()


@hookimpl
def hpctrain_compression() -> list[type[Compression]]:
    return [Plain, BFloat16, Float16]
