"""The communicators mpi, nccl, and auto, which chooses the best available one."""

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
    accelerator_count,
    device_of_rank,
    gloo_backend,
    hookimpl,
    mpi_backend,
)

_GPU = "cuda"
"""torch's name for the accelerators that NCCL, NVIDIA's own library, supports."""


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


class NCCL(Communicator):
    """NVIDIA's communicator, for ranks that compute on GPUs; one GPU per rank of a node."""

    name = "nccl"
    preference: ClassVar[int | None] = 30

    def missing(self, machine: Machine) -> str | None:
        kind = accelerator()
        if kind is None or kind.type != _GPU:
            return "there is no GPU that torch can use"
        if not dist.is_nccl_available():
            return "this torch was built without NCCL"
        visible, identity = accelerator_count(), machine.identity
        # srun --gpus-per-task makes one GPU visible per task
        if visible < identity.local_size and visible != 1:
            return f"node {identity.node} has {identity.local_size} ranks and {visible} GPUs"
        return None

    def backend(self) -> str:
        return f"cpu:{gloo_backend()},{_GPU}:nccl"

    def device(self, identity: Identity) -> torch.device:
        return device_of_rank(identity.local_rank)


class AutoCommunicator(Communicator):
    """The available communicator with the highest preference."""

    name = "auto"

    def choose(self, identity: Identity, installed: list[Communicator]) -> Communicator:
        machine = Machine(identity)
        candidates = [c for c in installed if c.preference is not None]
        for candidate in sorted(candidates, key=lambda c: -(c.preference or 0)):
            if candidate.missing(machine) is None:
                return candidate
        reasons = "; ".join(f"{c.name}: {c.missing(machine)}" for c in candidates)
        raise EnvironmentUnfitError(f"no communicator is available ({reasons})")

    def backend(self) -> str:
        raise EnvironmentUnfitError("auto has no backend itself: it chooses a communicator")

    def device(self, identity: Identity) -> torch.device:
        raise EnvironmentUnfitError("auto has no device itself: it chooses a communicator")


@hookimpl
def hpctrain_communicator() -> list[type[Communicator]]:
    return [MPI, NCCL, AutoCommunicator]
