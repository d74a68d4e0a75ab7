"""The place of this process among the ranks, which have their launcher's numbers."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import Literal

LaunchSource = Literal["mpi", "slurm", "torchrun", "starter", "alone"]


@dataclass(frozen=True)
class Identity:
    """Rank, world size and place on the node, and their source: MPI, srun, torchrun, or `hpctrain run -n` without MPI."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: str = field(default_factory=socket.gethostname)
    source: LaunchSource = "alone"
    accelerator: int | None = None
    """torch's index of the accelerator that rank 0 has assigned to this rank; None before that, and on CPUs."""
