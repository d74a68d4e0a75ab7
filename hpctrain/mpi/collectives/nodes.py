"""Large collectives of a group that spans nodes: through each node's memory, and slice by slice over the network.

The ranks with the same place on their nodes form a rail. A node's ranks share the work on its data, and each moves its
slice along its own rail, so that every byte crosses the network once per node instead of once per rank.

Sums are made within the nodes first, in rank order, then over the nodes in their order. The result has the same bits on all
ranks and for every bucket, but another number of nodes gives other bits. 16-bit floats are rounded after each level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from hpctrain.mpi.collectives import node_moves, node_reductions
from hpctrain.mpi.collectives.arithmetic import Reduction
from hpctrain.mpi.collectives.network import OverNetwork
from hpctrain.mpi.collectives.node import WithNode
from hpctrain.mpi.transfer.channel import SMALL, Channel
from hpctrain.mpi.transfer.node import NodeMemory


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
        in_node, over_nodes = _split(reduction)
        node_reductions.all_reduce(
            self._node, tensor, in_node, finish=lambda piece: self._rail.all_reduce(piece, over_nodes)
        )

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> None:
        if output.nbytes * self.size <= SMALL:
            super().reduce_scatter(output, inputs, reduction)
            return
        in_node, over_nodes = _split(reduction)
        # The part of the inputs of each rank on this rail, summed over this node.
        partial = output.new_empty(len(self._members), output.numel())
        for members, part in zip(self._members, partial, strict=True):
            node_reductions.reduce_scatter(self._node, part, [inputs[rank] for rank in members], in_node)
        self._rail.reduce_scatter(output, list(partial), over_nodes)

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


def _split(whole: Reduction) -> tuple[Reduction, Reduction]:
    """The reductions inside a node and over the nodes: the first gets the factor, the second the divisor."""
    return replace(whole, divisor=None), replace(whole, factor=None)
