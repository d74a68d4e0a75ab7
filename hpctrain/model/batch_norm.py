"""Batch normalization of a model over its data-parallel ranks (`[model] sync_batch_norm`)."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.base.batch_norm import SynchronizedBatchNorm
from hpctrain.model.refusals import BATCH_NORMS, refuse_batch_norms


class RankBatchNorm(SynchronizedBatchNorm):
    """A batch norm over the micro batches that the ranks of a group have at the same time."""

    group: dist.ProcessGroup

    @property
    def processes(self) -> int:
        return self.group.size()

    def gather(self, row: Tensor) -> Tensor:
        rows = row.new_empty((self.processes, *row.shape))
        dist.all_gather_single(rows, row, group=self.group)
        return rows

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.group)
        return values


def synchronize_batch_norms(module: nn.Module, name: str, group: dist.ProcessGroup) -> None:
    """Let the batch norms of `module` normalize over the ranks of `group`, with their parameters, buffers and hooks. Raises the
    errors of `refuse_batch_norms`."""
    refuse_batch_norms(module, name)
    for one in module.modules() if group.size() > 1 else ():
        if isinstance(one, BATCH_NORMS):
            one.__class__ = RankBatchNorm
            one.group = group  # type: ignore[assignment]  # no module, which would have parameters
