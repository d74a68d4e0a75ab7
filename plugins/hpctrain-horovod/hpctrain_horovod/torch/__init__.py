"""`import hpctrain_horovod.torch as hvd`: Horovod's functions for PyTorch."""

import torch as _torch

from hpctrain_horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from hpctrain_horovod.torch import elastic
from hpctrain_horovod.torch.compression import Compression
from hpctrain_horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hpctrain_horovod.torch.mpi_ops import *  # noqa: F403 - its __all__ is Horovod's list of operations
from hpctrain_horovod.torch.mpi_ops import __all__ as _operations
from hpctrain_horovod.torch.optimizer import DistributedOptimizer
from hpctrain_horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "ProcessSet",
    "SyncBatchNorm",
    "add_process_set",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "global_process_set",
    "remove_process_set",
    *_operations,
]


def _check_has_gpu() -> bool:
    """Whether torch can use an accelerator here."""
    return _torch.accelerator.is_available()
