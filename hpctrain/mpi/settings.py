"""How groups that are created from now on move their bytes. Imports nothing of hpctrain."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The same on all ranks.

    shared_memory: ranks of one node pass data through memory that they share, not through MPI.
    hierarchical: large collectives of a group that spans nodes go through each node's memory first, and each rank takes
    its slice over the network; needs shared_memory, and as many ranks of the group on each of its nodes.
    ranks_per_node: treat so many consecutive ranks of the world as a node (a NUMA domain, say); None: a node is a node.
    """

    shared_memory: bool = True
    hierarchical: bool = True
    ranks_per_node: int | None = None


_current = Settings()


def current() -> Settings:
    """What holds for a group that is created now."""
    return _current


def configure(*, shared_memory: bool = True, hierarchical: bool = True, ranks_per_node: int | None = None) -> None:
    """Set what `Settings` describes for the groups created from now on; call it alike on all ranks.

    Raises ValueError for a number of ranks below 1.
    """
    global _current
    if ranks_per_node is not None and ranks_per_node < 1:
        raise ValueError(f"found ranks_per_node = {ranks_per_node}, expected at least 1, or None")
    _current = Settings(shared_memory, hierarchical, ranks_per_node)
