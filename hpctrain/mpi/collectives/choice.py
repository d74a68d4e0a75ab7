"""Chooses one of the three routes for a group. All ranks of the group choose the same."""

from __future__ import annotations

import warnings

from hpctrain.mpi.all_ranks import gather_json, on_all, world
from hpctrain.mpi.collectives.network import OverNetwork
from hpctrain.mpi.collectives.node import OverNode
from hpctrain.mpi.collectives.nodes import OverNodes
from hpctrain.mpi.collectives.protocol import Collectives
from hpctrain.mpi.library import MPI
from hpctrain.mpi.settings import Settings
from hpctrain.mpi.transfer.channel import Channel
from hpctrain.mpi.transfer.node import NodeMemory
from hpctrain.mpi.transfer.watch import OperationWatch


def choose(channel: Channel, watch: OperationWatch, settings: Settings) -> Collectives:
    """Choose the node's memory if all ranks share a node, two levels if every node has as many ranks, else MPI. Collective."""
    comm = channel.comm
    if comm.size == 1 or not settings.shared_memory:
        return OverNetwork(channel)
    if settings.ranks_per_node is None:
        local = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    else:
        local = comm.Split(world().rank // settings.ranks_per_node, comm.rank)
    members = sorted({tuple(ranks) for ranks in gather_json(comm, gather_json(local, comm.rank))})
    wanted = all(len(ranks) == len(members[0]) > 1 for ranks in members) and (
        len(members) == 1 or settings.hierarchical
    )
    node = _create_node(comm, local, watch) if wanted else None
    if node is None:
        local.Free()
        return OverNetwork(channel)
    if len(members) == 1:
        return OverNode(channel, node)
    mine = next(i for i, ranks in enumerate(members) if comm.rank in ranks)
    rail = Channel(comm.Split(node.rank, mine), watch)
    return OverNodes(channel, node, rail, [list(ranks) for ranks in members])


def _create_node(comm: MPI.Comm, local: MPI.Comm, watch: OperationWatch) -> NodeMemory | None:
    node = NodeMemory.create(local, watch)
    if on_all(comm, node is not None):
        return node
    if comm.rank == 0:
        warnings.warn(
            "ranks of one node cannot map each other's memory here; their data goes through MPI, which is slower",
            stacklevel=2,
        )
    return None
