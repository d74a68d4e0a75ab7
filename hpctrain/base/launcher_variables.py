"""torchrun's variables for the ranks of mpiexec, PALS, Flux and srun: scripts read them before they set torch.distributed up."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

_NAMES = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PALS_RANKID", "FLUX_TASK_RANK", "SLURM_PROCID"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "FLUX_JOB_SIZE", "SLURM_STEP_NUM_TASKS"),
    "LOCAL_RANK": (
        "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "FLUX_TASK_LOCAL_ID", "SLURM_LOCALID",
    ),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}  # fmt: skip
"""The variables of Open MPI's mpiexec, MPICH's, PALS, Flux and srun, in the order in which they are asked: mpiexec may run inside
srun."""


def set_variables(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set those that a launcher has told under another name; what is set stays."""
    in_step = "SLURM_STEP_NUM_TASKS" in environment  # a batch script has some of srun's variables without being a task
    for name, others in _NAMES.items():
        known = (other for other in others if other in environment and (in_step or not other.startswith("SLURM_")))
        told = next((environment[other] for other in known), None)
        if told is not None:
            environment.setdefault(name, told)
