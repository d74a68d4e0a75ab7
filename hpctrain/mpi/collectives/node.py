"""Collectives of ranks that all share the memory of one node."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.mpi.collectives import node_moves, node_reductions
from hpctrain.mpi.collectives.arithmetic import Reduction
from hpctrain.mpi.collectives.network import OverNetwork
from hpctrain.mpi.transfer.buffers import flattened
from hpctrain.mpi.transfer.channel import SMALL, Channel
from hpctrain.mpi.transfer.node import NodeMemory
from hpctrain.mpi.transfer.operation import Operation


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
