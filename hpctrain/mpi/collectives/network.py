"""Collectives over MPI, which every group can use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from hpctrain.mpi.collectives import network_reductions, sparse
from hpctrain.mpi.collectives.arithmetic import Reduction
from hpctrain.mpi.collectives.protocol import SMALL
from hpctrain.mpi.transfer.buffers import MAX_COUNT, flattened, overlap, same_memory
from hpctrain.mpi.transfer.channel import Channel
from hpctrain.mpi.transfer.operation import Operation

_STAGED = 64 * 1024
"""Bytes over all ranks up to which a list is gathered in one MPI call and then copied out."""


class OverNetwork:
    """All of `Collectives`. The other routes inherit every operation that they do not improve."""

    def __init__(self, channel: Channel) -> None:
        self.rank, self.size = channel.rank, channel.size
        self._channel = channel

    def begin(self, operation: Operation) -> None:
        # If sizes differ between ranks, some ranks may meet here and others not; the operation then times out.
        if operation.meet_first or operation.nbytes * self.size > SMALL:
            self._channel.meet()

    def barrier(self) -> None:
        self._channel.barrier()

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self._channel.broadcast(tensor, root)

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        network_reductions.all_reduce(self._channel, tensor, reduction)

    def reduce(self, tensor: Tensor, reduction: Reduction, root: int) -> None:
        network_reductions.reduce(self._channel, tensor, reduction, root)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> None:
        network_reductions.reduce_scatter(self._channel, output, inputs, reduction)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, reduction: Reduction) -> None:
        pieces = list(flattened(tensor).tensor_split(self.size))
        if overlap(output, tensor) and not same_memory(output, pieces[self.rank]):
            pieces = [piece.clone() for piece in pieces]
        self.reduce_scatter(output, pieces, reduction)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, *, even: bool) -> None:
        channel = self._channel
        if even and channel.size > 1 and tensor.nbytes * channel.size <= _STAGED:
            gathered = channel.scratch(tensor.nbytes * channel.size).view(tensor.dtype)
            channel.all_gather(gathered, tensor)
            if tensor.numel():
                for output, part in zip(outputs, gathered.chunk(channel.size), strict=True):
                    output.view(-1).copy_(part)
            return
        self._exchange(outputs, [tensor] * self.size)

    def all_gather_single(self, output: Tensor, tensor: Tensor) -> None:
        in_place = tensor.data_ptr() == output.data_ptr() + self.rank * tensor.nbytes
        if not in_place and overlap(tensor, output):
            tensor = tensor.clone()
        self._all_gather_single(output, tensor, in_place)

    def _all_gather_single(self, output: Tensor, tensor: Tensor, in_place: bool) -> None:
        """in_place: `tensor` is this rank's slice of `output`. Otherwise they share no memory."""
        if self.size == 1 or output.nbytes > MAX_COUNT:
            OverNetwork.all_gather(self, output.view(-1).tensor_split(self.size), tensor, even=True)
        else:
            self._channel.all_gather(output, None if in_place else tensor)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, even: bool) -> None:
        self._exchange(outputs, inputs)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> None:
        if self.rank != root:
            self._channel.exchange([(root, tensor)], [])
            return
        self._channel.exchange([], [(rank, output) for rank, output in enumerate(outputs) if rank != root])
        _copy(outputs[root], tensor)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
        if self.rank != root:
            self._channel.exchange([], [(root, output)])
            return
        self._channel.exchange([(rank, tensor) for rank, tensor in enumerate(inputs) if rank != root], [])
        _copy(output, inputs[root])

    def sparse_all_reduce(self, tensor: Tensor, op: ReduceOp | ReduceOp.RedOpType) -> None:
        sparse.all_reduce(self._channel, tensor, op)

    def allocate(self, nbytes: int) -> Tensor:
        with torch.inference_mode(False):  # it outlasts the operation
            return torch.zeros(nbytes, dtype=torch.uint8)

    def free(self) -> None:
        self._channel.comm.Free()

    def _exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Send `inputs[r]` to rank r and receive from rank r into `outputs[r]`."""
        others = self._channel.others
        own = partial(_copy, outputs[self.rank], inputs[self.rank])
        self._channel.exchange([(r, inputs[r]) for r in others], [(r, outputs[r]) for r in others], meanwhile=own)


def _copy(output: Tensor, tensor: Tensor) -> None:
    if not same_memory(output, tensor):
        output.view(-1).copy_(tensor.view(-1))
