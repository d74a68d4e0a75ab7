"""Batch normalization over the samples of all ranks, on any device."""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor

from hpctrain.base.batch_norm import SynchronizedBatchNorm
from hpctrain_horovod.torch.mpi_ops import Sum, allgather, allreduce, is_initialized, size

_numbers = itertools.count()


class SyncBatchNorm(SynchronizedBatchNorm):
    """torch.nn.BatchNorm with the mean and the variance of the global batch; ranks may have different numbers of samples."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Take the arguments of torch.nn.BatchNorm1d."""
        super().__init__(*arguments, **options)
        self._name = f"sync_batch_norm.{next(_numbers)}"

    @property
    def processes(self) -> int:
        return size() if is_initialized() else 1

    def gather(self, row: Tensor) -> Tensor:
        return allgather(row.unsqueeze(0), f"{self._name}.statistics")

    def sum(self, values: Tensor) -> Tensor:
        return allreduce(values, op=Sum, name=f"{self._name}.gradients")
