"""How one group moves bytes: through a node's memory where all ranks share it, in two levels where it spans nodes, and
over MPI for everything else. One thread at a time uses it; all ranks choose alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.mpi import collectives, hierarchy, reduction, shared_collectives, shared_reduction
from hpctrain.mpi.buffers import flattened, overlap, same_memory
from hpctrain.mpi.channel import Channel
from hpctrain.mpi.hierarchy import Hierarchy
from hpctrain.mpi.library import MPI
from hpctrain.mpi.node import Node
from hpctrain.mpi.operation import Operation
from hpctrain.mpi.presence import Presence
from hpctrain.mpi.reduction import SMALL, Reduction
from hpctrain.mpi.settings import Settings
from hpctrain.mpi.watch import Watch


class Transport:
    """The ways between the ranks of one group."""

    def __init__(self, comm: MPI.Comm, presence: Presence, settings: Settings) -> None:
        """Collective over `comm`."""
        self.rank, self.size = comm.rank, comm.size
        self.watch = Watch(presence)
        self.network = Channel(comm, self.watch)
        self._node, self._hierarchy = _levels(comm, self.watch, settings)

    def run(self, operation: Operation, number: int, *, in_worker: bool) -> None:
        """Run one operation, the group's `number`-th, to its end.

        Raises CommunicationTimeoutError after `operation.timeout` seconds, OperationMismatchError when the ranks
        called different things.
        """
        self.watch.start(operation, number, in_worker=in_worker)
        # In a node's memory the first round of every operation tells who called what; MPI has to ask for it. Sizes that
        # differ between ranks make them disagree about whether to, and time out.
        if self._node is None and (operation.meet_first or operation.nbytes * self.size > SMALL):
            self.network.meet()
        elif operation.meet_first:
            self.barrier()
        # In the caller's mode, buffers that are kept from one operation to the next would take that of the first, and a
        # worker could not write to a tensor of inference mode. In this mode both kinds can be written to.
        with torch.inference_mode():
            operation.run(self)

    def allocate(self, nbytes: int) -> Tensor:
        """Zeros, (nbytes,) uint8, in memory that the ranks of a node share where there is any. Collective."""
        node = self._hierarchy.node if self._hierarchy is not None else self._node
        with torch.inference_mode(False):  # it outlasts the operation
            memory = node.allocate(nbytes) if node is not None and nbytes else None
            return torch.zeros(nbytes, dtype=torch.uint8) if memory is None else memory

    def free(self) -> None:
        """Give the communicators back. Collective."""
        if self._hierarchy is not None:
            self._hierarchy.rail.comm.Free()
            self._hierarchy.node.comm.Free()
        if self._node is not None:
            self._node.comm.Free()
        self.network.comm.Free()

    # What operations are made of. All tensors are plain (see buffers) and checked.

    def barrier(self) -> None:
        """Return when every rank is here."""
        if self._node is not None:
            self._node.sync()
        else:
            self.network.barrier()

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """The root's bytes to all."""
        if self._node is not None:
            shared_collectives.broadcast(self._node, tensor, root)
        else:
            self.network.broadcast(tensor, root)

    def all_reduce(self, tensor: Tensor, reduce: Reduction) -> None:
        """Reduce in place on all ranks."""
        if self._node is not None:
            shared_reduction.all_reduce(self._node, tensor, reduce)
        elif self._hierarchy is not None and tensor.nbytes * self.size > SMALL:
            hierarchy.all_reduce(self._hierarchy, tensor, reduce)
        else:
            reduction.all_reduce(self.network, tensor, reduce)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], reduce: Reduction) -> None:
        """Reduce `inputs`, one tensor of the output's size for each rank; `output` gets the own one.

        `output` may be the same memory as the own input, and must not overlap the others.
        """
        if self._node is not None:
            shared_reduction.reduce_scatter(self._node, output, inputs, reduce)
        elif self._hierarchy is not None and output.nbytes * self.size > SMALL:
            hierarchy.reduce_scatter(self._hierarchy, output, inputs, reduce)
        else:
            reduction.reduce_scatter(self.network, output, inputs, reduce)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, reduce: Reduction) -> None:
        """Reduce `tensor`, the ranks' pieces one after the other; `output` gets the own one. They may share memory."""
        if self._node is not None and tensor.nbytes <= SMALL:
            shared_reduction.reduce_scatter_small(self._node, output, tensor, reduce)
            return
        pieces = list(flattened(tensor).tensor_split(self.size))
        if overlap(output, tensor) and not same_memory(output, pieces[self.rank]):
            pieces = [piece.clone() for piece in pieces]
        self.reduce_scatter(output, pieces, reduce)

    def all_gather_single(self, output: Tensor, tensor: Tensor) -> None:
        """All ranks' `tensor` one after the other into `output`; they may share memory."""
        if self._node is not None and output.nbytes <= SMALL:
            shared_collectives.all_gather_small(self._node, output, tensor)
            return
        in_place = tensor.data_ptr() == output.data_ptr() + self.rank * tensor.nbytes
        if not in_place and overlap(tensor, output):
            tensor = tensor.clone()
        if self._node is not None:
            shared_collectives.all_gather(self._node, flattened(output).tensor_split(self.size), tensor)
        elif self._hierarchy is not None and output.nbytes > SMALL:
            hierarchy.all_gather(self._hierarchy, output.view(-1).tensor_split(self.size), tensor)
        else:
            collectives.all_gather_single(self.network, output, tensor)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, *, even: bool) -> None:
        """All ranks' `tensor` into one output for each. even: all are of one size."""
        if self._node is not None and even:
            shared_collectives.all_gather(self._node, outputs, tensor)
        elif self._hierarchy is not None and even and tensor.nbytes * self.size > SMALL:
            hierarchy.all_gather(self._hierarchy, outputs, tensor)
        else:
            collectives.all_gather(self.network, outputs, tensor, even=even)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, even: bool) -> None:
        """`inputs[r]` to rank r, whose own comes into `outputs[r]`. Outputs and inputs share no memory."""
        if self._node is not None and even:
            shared_collectives.all_to_all(self._node, outputs, inputs)
        else:
            collectives.all_to_all(self.network, outputs, inputs)


def _levels(comm: MPI.Comm, watch: Watch, settings: Settings) -> tuple[Node | None, Hierarchy | None]:
    """The node, if all ranks share one; else the hierarchy, if the nodes are alike. Collective."""
    if comm.size == 1 or not settings.shared_memory:
        return None, None
    if settings.ranks_per_node is None:
        local = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    else:
        local = comm.Split(MPI.COMM_WORLD.rank // settings.ranks_per_node, comm.rank)
    members = sorted({tuple(ranks) for ranks in comm.allgather(local.allgather(comm.rank))})
    wanted = all(len(ranks) == len(members[0]) > 1 for ranks in members) and (
        len(members) == 1 or settings.hierarchical
    )
    node = _create_node(comm, local, watch) if wanted else None
    if node is None:
        local.Free()
    if node is None or len(members) == 1:
        return node, None
    mine = next(i for i, ranks in enumerate(members) if comm.rank in ranks)
    rail = Channel(comm.Split(node.rank, mine), watch)
    return None, Hierarchy(node, rail, [list(ranks) for ranks in members])


def _create_node(comm: MPI.Comm, local: MPI.Comm, watch: Watch) -> Node | None:
    node = Node.create(local, watch)
    if comm.allreduce(node is not None, MPI.LAND):
        return node
    if comm.rank == 0:
        warnings.warn(
            "ranks of one node cannot map each other's memory here: MPI carries their data, slower", stacklevel=2
        )
    return None
