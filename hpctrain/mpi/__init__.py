"""torch.distributed over MPI with stock PyTorch. `import hpctrain.mpi` registers the backend and the rendezvous.

    import torch.distributed as dist
    import hpctrain.mpi

    dist.init_process_group("mpi4py", init_method="mpi://")  # CPU tensors over MPI
    dist.init_process_group("nccl", init_method="mpi://")    # any backend; MPI only gives rank and world size

Start such a script with mpiexec or srun. `pg_options=hpctrain.mpi.Settings(...)` in either call, or in new_group, selects
how the group moves its bytes. A group without options takes those of the world's group.

Importing this package does not start MPI. It sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun does, from
the variables of mpiexec or srun. It uses only hpctrain.base.store and the base (accounting, errors, launcher_variables,
torch_groups, torch_private, transports) from the rest of hpctrain.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import register_rendezvous_handler

from hpctrain.base.accounting import OperationStatistics, Statistics, statistics
from hpctrain.base.launcher_variables import set_variables
from hpctrain.mpi.errors import CommunicationError, CommunicationTimeoutError, OperationMismatchError
from hpctrain.mpi.process_group import BACKEND, Settings

if TYPE_CHECKING:
    from hpctrain.mpi.library import MPI
    from hpctrain.mpi.transfer.waiting import Patience, wait_until

__all__ = [
    "BACKEND",
    "MPI",
    "CommunicationError",
    "CommunicationTimeoutError",
    "OperationMismatchError",
    "OperationStatistics",
    "Patience",
    "Settings",
    "Statistics",
    "create_group",
    "local_rank",
    "shared_zeros",
    "statistics",
    "wait_until",
    "world",
]


def __getattr__(name: str) -> Any:
    """Names that a program without MPI does not need. `MPI`, mpi4py's module, starts MPI, with threads, and without ports where
    all ranks share a node."""
    if name == "MPI":
        from hpctrain.mpi.library import MPI

        return MPI
    if name in ("Patience", "wait_until"):
        from hpctrain.mpi.transfer import waiting

        return getattr(waiting, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def world() -> MPI.Intracomm:
    """The communicator of all ranks. Starts MPI."""
    from hpctrain.mpi.library import MPI

    return MPI.COMM_WORLD


def local_rank() -> int:
    """This rank's place among the ranks of its node; 0 where no launcher has started it. Collective where only MPI knows it."""
    told = os.environ.get("LOCAL_RANK")
    if told is not None:
        return int(told)
    from hpctrain.mpi.library import MPI

    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    rank = int(node.rank)
    node.Free()  # MPI has few communicators
    return rank


def shared_zeros(elements: int, dtype: torch.dtype, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Zeros, (elements,), in memory that the ranks of `group` on this node share; the same size on each rank. Collective.

    Reductions and gathers of the group read such a tensor in place instead of copying it, and also a slice that is the same on all
    ranks. The memory lives as long as the group. For a group of another backend it is ordinary memory.
    """
    allocate = getattr(group or dist.group.WORLD, "allocate", None)
    if allocate is None:
        return torch.zeros(elements, dtype=dtype)
    memory: torch.Tensor = allocate(elements * dtype.itemsize)
    return memory.view(dtype)


def mpi_backend() -> str:
    """The name of torch.distributed's backend over MPI, for communicators that use it. Its options are MPISettings."""
    return BACKEND


def create_group(options: Any, settings: Settings | None = None) -> dist.ProcessGroup:
    """The group that `options` describe, as torch gives them to a backend. settings: None for those of the world's group.

    options: global_ranks_in_group, group_rank, group_size, group_id, store and timeout. Collective over the group's ranks. Raises
    EnvironmentUnfitError if torch and MPI number the ranks differently, CommunicationTimeoutError if a member does not call this.
    """
    from hpctrain.mpi.process_group.creation import create_group

    if settings is None:
        settings = getattr(dist.group.WORLD, "settings", Settings())
    if not isinstance(settings, Settings):
        raise TypeError(f"found pg_options of {type(settings)}, expected hpctrain.mpi.Settings")
    return create_group(options, settings)


def _rendezvous(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """The store, the rank and the world size, for torch.distributed's mpi://. Collective; raises the errors of `open_over_mpi`."""
    from hpctrain.mpi.rendezvous import open_over_mpi

    yield open_over_mpi(timeout), world().rank, world().size
    raise RuntimeError("mpi:// cannot meet a second time; call init_process_group again")


dist.Backend.register_backend(BACKEND, create_group, extended_api=True, devices=["cpu"])
register_rendezvous_handler("mpi", _rendezvous)
set_variables()
