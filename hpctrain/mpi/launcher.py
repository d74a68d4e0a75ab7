"""This rank's place on its node."""

from __future__ import annotations

import os


def local_rank() -> int:
    """This rank's place among the ranks of its node; 0 where no launcher has started it. Collective where only MPI knows it."""
    told = os.environ.get("LOCAL_RANK")
    if told is not None:
        return int(told)
    from hpctrain.mpi.library import MPI

    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    rank = int(node.rank)
    node.Free()
    return rank
