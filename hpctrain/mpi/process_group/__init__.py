"""A process group of torch's over MPI; and the settings of its transport, which torch.distributed takes as pg_options."""

from __future__ import annotations

from dataclasses import dataclass

BACKEND = "mpi4py"
"""torch reserves the name "mpi" for its own builds with MPI."""


@dataclass(frozen=True)
class Settings:
    """Must be equal on all ranks. Raises ValueError if ranks_per_node is below 1.

    shared_memory: ranks of one node pass data through shared memory, not through MPI.
    hierarchical: large collectives of a group that spans nodes go through each node's memory first, and each rank moves
    its slice over the network. Requires shared_memory and equally many ranks of the group on each node.
    ranks_per_node: treat this many consecutive ranks of the world as a node (a NUMA domain, say); None: real nodes.
    """

    shared_memory: bool = True
    hierarchical: bool = True
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ValueError(f"found ranks_per_node = {self.ranks_per_node}, expected at least 1, or None")
