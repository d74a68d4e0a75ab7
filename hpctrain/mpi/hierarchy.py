"""Large collectives of a group that spans nodes: through each node's memory, and slice by slice over the network.

The ranks with the same place on their nodes form a rail. A node's ranks share the work on its data, and each moves its
slice along its own rail, so that every byte crosses the network once per node instead of once per rank.

Sums are made within the nodes first, in rank order, then over the nodes in their order: the same bits on all ranks and
for every bucket, but not those of another number of nodes. 16-bit floats are rounded after each of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from hpctrain.mpi import collectives, reduction, shared_collectives, shared_reduction
from hpctrain.mpi.channel import Channel
from hpctrain.mpi.node import Node
from hpctrain.mpi.reduction import Reduction


@dataclass(frozen=True)
class Hierarchy:
    """This rank's node and rail. members: the group ranks of each node, (nodes, ranks per node)."""

    node: Node
    rail: Channel
    members: list[list[int]]


def all_reduce(hierarchy: Hierarchy, tensor: Tensor, whole: Reduction) -> None:
    """Reduce a plain tensor in place on all ranks."""
    in_node, over_nodes = _split(whole)

    def finish(piece: Tensor) -> None:
        reduction.all_reduce(hierarchy.rail, piece, over_nodes)

    shared_reduction.all_reduce(hierarchy.node, tensor, in_node, finish)


def reduce_scatter(hierarchy: Hierarchy, output: Tensor, inputs: Sequence[Tensor], whole: Reduction) -> None:
    """As in reduction.py."""
    in_node, over_nodes = _split(whole)
    # What this rank's rail is to get, of each of its ranks, summed over this node.
    partial = output.new_empty(len(hierarchy.members), output.numel())
    for members, part in zip(hierarchy.members, partial, strict=True):
        shared_reduction.reduce_scatter(hierarchy.node, part, [inputs[rank] for rank in members], in_node)
    reduction.reduce_scatter(hierarchy.rail, output, list(partial), over_nodes)


def all_gather(hierarchy: Hierarchy, outputs: Sequence[Tensor], tensor: Tensor) -> None:
    """All ranks' `tensor`, of one size, into one output for each; `tensor` may be this rank's output."""
    place = hierarchy.node.rank
    collectives.all_gather(
        hierarchy.rail, [outputs[members[place]] for members in hierarchy.members], tensor, even=True
    )
    for members in hierarchy.members:
        shared_collectives.all_gather(hierarchy.node, [outputs[rank] for rank in members], outputs[members[place]])


def _split(whole: Reduction) -> tuple[Reduction, Reduction]:
    """What to do in a node and then over the nodes: factors belong to the summands, the divisor to the sum."""
    return replace(whole, divisor=None), replace(whole, factor=None)
