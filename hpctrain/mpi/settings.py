"""How a group moves its bytes: the pg_options of torch.distributed. Imports nothing of hpctrain."""

from __future__ import annotations

from dataclasses import dataclass

BACKEND = "mpi4py"
"""torch keeps the name "mpi" for a build of its own."""


@dataclass(frozen=True)
class Settings:
    """The same on all ranks. ValueError for a number of ranks below 1.

    shared_memory: ranks of one node pass data through memory that they share, not through MPI.
    hierarchical: large collectives of a group that spans nodes go through each node's memory first, and each rank takes
    its slice over the network; needs shared_memory, and as many ranks of the group on each of its nodes.
    ranks_per_node: treat so many consecutive ranks of the world as a node (a NUMA domain, say); None: a node is a node.
    """

    shared_memory: bool = True
    hierarchical: bool = True
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ValueError(f"found ranks_per_node = {self.ranks_per_node}, expected at least 1, or None")
