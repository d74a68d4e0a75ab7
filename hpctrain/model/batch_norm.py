"""Batch normalization of a model over its data-parallel ranks (`[model] sync_batch_norm`)."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.base.batch_norm import SynchronizedBatchNorm
from hpctrain.base.errors import UsageError

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


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


def has_batch_norms(module: nn.Module) -> bool:
    """Whether there is something to synchronize."""
    return any(isinstance(one, _KINDS) for one in module.modules())


def refuse_batch_norms(module: nn.Module, name: str) -> None:
    """Raises UsageError unless the model `name` has batch norms, all of them torch's own."""
    norms = [one for one in module.modules() if isinstance(one, _KINDS)]
    other = next((one for one in norms if type(one) not in _KINDS), None)
    if other is not None:
        raise UsageError(
            f"[model] sync_batch_norm: the model {name!r} has a {type(other).__name__}, a BatchNorm with code of its own, which "
            "would go on to normalize one rank's micro batch; expected torch's own BatchNorm1d, 2d or 3d"
        )
    if not norms:
        raise UsageError(f"[model] sync_batch_norm: the model {name!r} has no BatchNorm; leave the key out")


def synchronize_batch_norms(module: nn.Module, name: str, group: dist.ProcessGroup) -> None:
    """Let the batch norms of `module` normalize over the ranks of `group`, with their parameters, buffers and hooks. Raises the
    errors of `refuse_batch_norms`."""
    refuse_batch_norms(module, name)
    for one in module.modules() if group.size() > 1 else ():
        if isinstance(one, _KINDS):
            one.__class__ = RankBatchNorm
            one.group = group  # type: ignore[assignment]  # no module, which would have parameters
