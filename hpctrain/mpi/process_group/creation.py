"""Creates the process group of a set of ranks. Collective over those ranks only."""

from __future__ import annotations

import warnings
import zlib
from typing import Any

from torch.distributed import DistStoreError

from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.base.store.client import await_members
from hpctrain.mpi import leaving
from hpctrain.mpi.all_ranks import gather_json
from hpctrain.mpi.collectives.network import OverNetwork
from hpctrain.mpi.collectives.node import OverNode, OverNodes
from hpctrain.mpi.errors import CommunicationTimeoutError
from hpctrain.mpi.library import MPI
from hpctrain.mpi.process_group import Settings
from hpctrain.mpi.process_group.group import MPIProcessGroup
from hpctrain.mpi.transfer.channel import Channel
from hpctrain.mpi.transfer.node import NodeMemory
from hpctrain.mpi.transfer.watch import OperationWatch, Presence


def create_group(options: Any, settings: Settings) -> MPIProcessGroup:
    """The group that torch's `_DistributedBackendOptions` describe, for `hpctrain.mpi.create_group`."""
    everyone = MPI.COMM_WORLD
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    if max(ranks) >= everyone.size or ranks[options.group_rank] != everyone.rank:
        raise EnvironmentUnfitError(
            f"torch says that this process is rank {ranks[options.group_rank]} of at least {max(ranks) + 1}, MPI says "
            f"rank {everyone.rank} of {everyone.size}: start all ranks with one mpiexec or srun, and use "
            'init_method="mpi://"'
        )
    try:
        store = await_members(options)
    except DistStoreError as error:
        raise CommunicationTimeoutError(str(error)) from None
    # The tag separates groups of the same ranks that are made at the same time.
    tag = zlib.crc32(options.group_id.encode()) % 2**15
    comm = everyone.Create_group(everyone.group.Incl(ranks), tag)
    presence = Presence(store, options.group_rank, ranks, options.group_id)
    watch = OperationWatch(presence)
    collectives = _choose(Channel(comm, watch), watch, settings)
    group = MPIProcessGroup(collectives, comm, watch, settings, options.group_id, options.timeout)
    leaving.groups.add(group)
    return group


def _choose(channel: Channel, watch: OperationWatch, settings: Settings) -> OverNetwork:
    """The node's memory if all ranks share a node, two levels if every node has as many ranks, else MPI: the same on all ranks.
    Collective."""
    comm = channel.comm
    if comm.size == 1 or not settings.shared_memory:
        return OverNetwork(channel)
    if settings.ranks_per_node is None:
        local = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    else:
        local = comm.Split(MPI.COMM_WORLD.rank // settings.ranks_per_node, comm.rank)
    members = sorted({tuple(ranks) for ranks in gather_json(comm, gather_json(local, comm.rank))})
    wanted = all(len(ranks) == len(members[0]) > 1 for ranks in members) and (
        len(members) == 1 or settings.hierarchical
    )
    node = NodeMemory.create(local, watch) if wanted else None
    if not all(gather_json(comm, node is not None)) or node is None:
        if wanted and comm.rank == 0:
            warnings.warn(
                "ranks of one node cannot map each other's memory here; their data goes through MPI, which is slower",
                stacklevel=2,
            )
        local.Free()
        return OverNetwork(channel)
    if len(members) == 1:
        return OverNode(channel, node)
    mine = next(i for i, ranks in enumerate(members) if comm.rank in ranks)
    rail = Channel(comm.Split(node.rank, mine), watch)
    return OverNodes(channel, node, rail, [list(ranks) for ranks in members])
