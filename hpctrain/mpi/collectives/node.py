"""Collectives of ranks that share the memory of nodes: of one, and large ones of a group that spans nodes, slice by slice over the
network.

The ranks with the same place on their nodes form a rail. A node's ranks share the work on its data, and each moves its
slice along its own rail, so that every byte crosses the network once per node instead of once per rank.

Sums are made within the nodes first, in rank order, then over the nodes in their order. The result has the same bits on all
ranks and for every bucket, but another number of nodes gives other bits. 16-bit floats are rounded after each level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hpctrain.mpi.collectives import node_moves, node_reductions
from hpctrain.mpi.collectives.arithmetic import Reduction
from hpctrain.mpi.collectives.network import OverNetwork
from hpctrain.mpi.transfer.buffers import flattened
from hpctrain.mpi.transfer.channel import SMALL, Channel
from hpctrain.mpi.transfer.node import NodeMemory
from hpctrain.mpi.transfer.watch import Operation


class WithNode(OverNetwork):
    """Allocates in the memory of this rank's node."""

    def __init__(self, channel: Channel, node: NodeMemory) -> None:
        super().__init__(channel)
        self._node = node

    def allocate(self, nbytes: int) -> Tensor:
        with torch.inference_mode(False):  # it outlasts the operation
            memory = self._node.allocate(nbytes) if nbytes else None
        return super().allocate(nbytes) if memory is None else memory

    def free(self) -> None:
        self._node.comm.Free()
        super().free()


class OverNode(WithNode):
    """Collectives through the node's memory. Uneven sizes, and all operations with a root but broadcast, go over MPI."""

    def begin(self, operation: Operation) -> None:
        # The first round of every operation compares what the ranks called anyway.
        if operation.meet_first:
            self._node.sync()

    def barrier(self) -> None:
        self._node.sync()

    def broadcast(self, tensor: Tensor, root: int) -> None:
        node_moves.broadcast(self._node, tensor, root)

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        node_reductions.all_reduce(self._node, tensor, reduction)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> None:
        node_reductions.reduce_scatter(self._node, output, inputs, reduction)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, reduction: Reduction) -> None:
        if tensor.nbytes <= SMALL:
            node_reductions.reduce_scatter_small(self._node, output, tensor, reduction)
        else:
            super().reduce_scatter_single(output, tensor, reduction)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, *, even: bool) -> None:
        if even:
            node_moves.all_gather(self._node, outputs, tensor)
        else:
            super().all_gather(outputs, tensor, even=False)

    def all_gather_single(self, output: Tensor, tensor: Tensor) -> None:
        if output.nbytes <= SMALL:
            node_moves.all_gather_small(self._node, output, tensor)
        else:
            super().all_gather_single(output, tensor)

    def _all_gather_single(self, output: Tensor, tensor: Tensor, in_place: bool) -> None:
        node_moves.all_gather(self._node, flattened(output).tensor_split(self.size), tensor)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, even: bool) -> None:
        if even:
            node_moves.all_to_all(self._node, outputs, inputs)
        else:
            super().all_to_all(outputs, inputs, even=False)


class OverNodes(WithNode):
    """Collectives in two levels. Small messages, uneven sizes and operations with a root go over MPI alone."""

    def __init__(self, channel: Channel, node: NodeMemory, rail: Channel, members: list[list[int]]) -> None:
        """node, rail: those of this rank. members: the group ranks of each node, (nodes, ranks per node)."""
        super().__init__(channel, node)
        self._rail, self._members = OverNetwork(rail), members

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        if tensor.nbytes * self.size <= SMALL:
            super().all_reduce(tensor, reduction)
            return
        in_node = replace(reduction, divisor=None)
        node_reductions.all_reduce(
            self._node, tensor, in_node, finish=lambda piece: self._rail.all_reduce(piece, reduction)
        )

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> None:
        if output.nbytes * self.size <= SMALL:
            super().reduce_scatter(output, inputs, reduction)
            return
        in_node = replace(reduction, divisor=None)
        # The part of the inputs of each rank on this rail, summed over this node.
        partial = output.new_empty(len(self._members), output.numel())
        for members, part in zip(self._members, partial, strict=True):
            node_reductions.reduce_scatter(self._node, part, [inputs[rank] for rank in members], in_node)
        self._rail.reduce_scatter(output, list(partial), reduction)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, *, even: bool) -> None:
        if not even or tensor.nbytes * self.size <= SMALL:
            super().all_gather(outputs, tensor, even=even)
            return
        place = self._node.rank
        self._rail.all_gather([outputs[members[place]] for members in self._members], tensor, even=True)
        for members in self._members:
            node_moves.all_gather(self._node, [outputs[rank] for rank in members], outputs[members[place]])

    def _all_gather_single(self, output: Tensor, tensor: Tensor, in_place: bool) -> None:
        if output.nbytes <= SMALL:
            super()._all_gather_single(output, tensor, in_place)
        else:
            self.all_gather(output.view(-1).tensor_split(self.size), tensor, even=True)

    def free(self) -> None:
        self._rail.free()
        super().free()
