"""The communicator horovod, for sites whose MPI is tuned through a Horovod of their own."""

from __future__ import annotations

import importlib
import os
import sys
from math import ceil
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from hpctrain.api import (
    Communicator,
    EnvironmentUnfitError,
    Identity,
    Machine,
    Plan,
    Problem,
    hookimpl,
)
from hpctrain_horovod.communicator.group import HorovodGroup

_BACKEND = "horovod"
_BUILD = (
    "build one with HOROVOD_WITH_MPI=1 HOROVOD_WITH_PYTORCH=1 pip install --no-build-isolation "
    "git+https://github.com/horovod/horovod, or take the communicator mpi"
)


class Horovod(Communicator):
    """A real Horovod, built with MPI and PyTorch, for ranks that compute on CPUs. Only data parallelism over all ranks."""

    name = "horovod"
    preference: ClassVar[int | None] = None

    def problems(self, plan: Plan) -> list[Problem]:
        if plan.axes is None:
            return []
        cut = {axis: size for axis, size in plan.axes.items() if size > 1}
        if len(cut) <= 1 and not plan.sizes:
            return []
        found = ", ".join(f"{axis} = {size}" for axis, size in cut.items())
        return [Problem(f"Horovod's ranks reduce together: found the axes {found}, expected one data axis; take mpi")]

    def missing(self, machine: Machine) -> str | None:
        if machine.identity.source not in ("mpi", "alone"):
            return f"the ranks were started by {machine.identity.source} without MPI"
        try:
            hvd = _horovod()
        except ImportError as error:
            return f"no Horovod with PyTorch can be imported ({error}); {_BUILD}"
        if _is_shim(hvd):
            return f"`import horovod` gives {hvd.__name__}, which is hpctrain's own; {_BUILD}"
        if not hvd.mpi_built():
            return f"the Horovod that is installed was built without MPI; {_BUILD}"
        return None

    def backend(self) -> str:
        if not hasattr(dist.Backend, _BACKEND.upper()):
            dist.Backend.register_backend(_BACKEND, create, extended_api=True, devices=["cpu"])
        return f"cpu:{_BACKEND}"

    def device(self, identity: Identity) -> torch.device:
        return torch.device("cpu")


def create(options: Any, _: Any = None) -> dist.ProcessGroup:
    """The group that torch.distributed's options describe: of all ranks, or of one.

    Raises EnvironmentUnfitError for other groups, and if Horovod counts the ranks differently.
    """
    hvd = _horovod()
    rank, size = options.group_rank, options.group_size
    if size == 1:
        return HorovodGroup(hvd, rank, size, options.group_id, options.timeout)
    if not hvd.is_initialized():
        # Horovod's own limit: rank 0 names the operation and its missing ranks, and all ranks fail
        limit = max(1, ceil(options.timeout.total_seconds()))
        os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(limit))
        os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(min(60, limit)))
        hvd.init()
    members = list(options.global_ranks_in_group) or list(range(size))
    if members != list(range(hvd.size())) or rank != hvd.rank():
        raise EnvironmentUnfitError(
            f"communicator horovod: found rank {rank} of a group of the ranks {members}, expected rank {hvd.rank()} of all "
            f"{hvd.size()} ranks that Horovod has; take mpi"
        )
    return HorovodGroup(hvd, rank, size, options.group_id, options.timeout)


def _horovod() -> ModuleType:
    return importlib.import_module("horovod.torch")


def _is_shim(hvd: ModuleType) -> bool:
    return hvd is sys.modules.get("hpctrain_horovod.torch")


@hookimpl
def hpctrain_communicator() -> list[type[Communicator]]:
    return [Horovod]
