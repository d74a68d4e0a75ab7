"""All ranks over MPI, as hpctrain numbers them: as MPI does, until `number_by_node`."""

from __future__ import annotations

from hpctrain.mpi import values
from hpctrain.mpi.library import MPI

_world = MPI.COMM_WORLD


def world() -> MPI.Intracomm:
    """The communicator of all ranks."""
    return _world


def number_by_node() -> bool:
    """Number the ranks node by node from now on, so that neighbours share a node; rank 0 stays rank 0. Collective.

    Returns whether that differs from MPI's numbers: the launcher has dealt the ranks out to the nodes in turn.
    """
    global _world
    launched = MPI.COMM_WORLD
    if _world is not launched:
        return True
    node = launched.Split_type(MPI.COMM_TYPE_SHARED, launched.rank)
    first_here = values.broadcast(node, launched.rank)
    node.Free()
    ordered = launched.Split(0, first_here)  # ranks of one node, with equal keys, keep their order
    if values.on_all(launched, ordered.rank == launched.rank):
        ordered.Free()
        return False
    assert isinstance(ordered, MPI.Intracomm)  # what a part of an intracommunicator is
    _world = ordered
    return True
