"""The communicators mpi, accelerator, nccl, and auto, which chooses among those that every rank can use."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist
from pydantic import model_validator

from hpctrain.api import (
    Communicator,
    EnvironmentUnfitError,
    Field,
    Identity,
    Machine,
    MPISettings,
    Options,
    accelerator,
    device_name,
    device_of_rank,
    gloo_backend,
    has_float64,
    hookimpl,
    mpi_backend,
)

# torch's name for the accelerators of NCCL, and of RCCL, which torch calls NCCL, too
_GPU = "cuda"


class MPIOptions(Options):
    shared_memory: bool = Field(
        default=True, description="ranks of a node pass data through shared memory, not through MPI"
    )
    hierarchical: bool | None = Field(
        default=None,
        description="large collectives over several nodes go through each node's memory first, and each rank moves a "
        "slice over the network; needs shared_memory, and equally many ranks on each node (default: as shared_memory)",
    )

    @model_validator(mode="after")
    def _nodes_need_their_memory(self) -> MPIOptions:
        if self.hierarchical and not self.shared_memory:
            raise ValueError("hierarchical = true needs shared_memory = true, found false")
        return self


class MPI(Communicator):
    """MPI through mpi4py, for ranks that compute on CPUs."""

    name = "mpi"
    Options = MPIOptions
    options: MPIOptions
    preference: ClassVar[int | None] = 20

    def missing(self, machine: Machine) -> str | None:
        identity = machine.identity
        if identity.source == "mpi":
            return None
        if identity.source == "alone":
            return "this process was not started by an MPI launcher: use mpiexec, or hpctrain run -n"
        return f"the ranks were started by {identity.source} without MPI"

    def backend(self) -> str:
        return f"cpu:{mpi_backend()}"

    def backend_options(self) -> MPISettings:
        return MPISettings(self.options.shared_memory, self.options.hierarchical is not False)

    def device(self, identity: Identity) -> torch.device:
        return torch.device("cpu")


class Accelerator(Communicator):
    """torch's own communicator for the accelerators of this machine, such as NCCL on NVIDIA's and AMD's, XCCL on Intel's."""

    name = "accelerator"
    preference: ClassVar[int | None] = 30
    on_accelerators: ClassVar[bool] = True

    def missing(self, machine: Machine) -> str | None:
        kind = accelerator()
        if kind is None:
            return "there is no accelerator that torch can use"
        if not has_float64(torch.device(kind.type, 0)):
            return f"{device_name(torch.device(kind.type, 0))} has no float64, in which losses are summed"
        library = dist.get_default_backend_for_device(kind)
        return None if dist.is_backend_available(library) else f"this torch was built without {library}"

    def backend(self) -> str:
        kind = accelerator()
        assert kind is not None  # `missing` has said so
        return f"cpu:{gloo_backend()},{kind.type}:{dist.get_default_backend_for_device(kind)}"

    def device(self, identity: Identity) -> torch.device:
        return device_of_rank(identity.local_rank if identity.accelerator is None else identity.accelerator)


class NCCL(Accelerator):
    """The same, for NVIDIA's and AMD's GPUs only."""

    name = "nccl"
    preference: ClassVar[int | None] = None

    def missing(self, machine: Machine) -> str | None:
        kind = accelerator()
        if kind is None or kind.type != _GPU:
            return "there is no GPU that torch can use"
        return super().missing(machine)


class AutoCommunicator(Communicator):
    """The communicator with the highest preference that every rank can use."""

    name = "auto"

    def candidates(self, installed: list[Communicator]) -> list[Communicator]:
        return sorted((one for one in installed if one.preference is not None), key=lambda one: -(one.preference or 0))

    def backend(self) -> str:
        raise EnvironmentUnfitError("auto has no backend itself: it chooses a communicator")

    def device(self, identity: Identity) -> torch.device:
        raise EnvironmentUnfitError("auto has no device itself: it chooses a communicator")


@hookimpl
def hpctrain_communicator() -> list[type[Communicator]]:
    return [MPI, Accelerator, NCCL, AutoCommunicator]
