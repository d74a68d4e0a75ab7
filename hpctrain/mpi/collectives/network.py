"""Collectives over MPI, which every group can use. All tensors are plain (see transfer/buffers.py) and checked.

To reduce a large tensor, it is cut into blocks. Of each block, every rank receives its piece from all others and adds them up;
then all ranks gather the sums. A small tensor is gathered whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from hpctrain.mpi.collectives.arithmetic import Reduction
from hpctrain.mpi.transfer.buffers import MAX_COUNT, flattened, overlap, same_memory
from hpctrain.mpi.transfer.channel import SMALL, Channel
from hpctrain.mpi.transfer.watch import Operation

# Scratch per reduction. It should stay in the cache, but pieces must not become tiny with many ranks.
_BLOCK = 8 * 2**20  # bytes
_LEAST_PIECE = 64 * 1024  # bytes
_ALIGNMENT = 64  # elements


class OverNetwork:
    """The collectives of one group, which the other routes inherit and improve.

    One thread at a time uses them; all ranks call the same ones in the same order.
    """

    def __init__(self, channel: Channel) -> None:
        self.rank, self.size = channel.rank, channel.size
        self._channel = channel

    def begin(self, operation: Operation) -> None:
        """Compare the operations that the ranks called, before data moves, if `operation` asks for it or if it is cheap
        compared with the data. Raises OperationMismatchError if they differ."""
        # If sizes differ between ranks, some ranks may meet here and others not; the operation then times out.
        if operation.meet_first or operation.nbytes * self.size > SMALL:
            self._channel.meet()

    def barrier(self) -> None:
        """Return when every rank is here."""
        self._channel.barrier()

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy the root's bytes to all ranks."""
        self._channel.broadcast(tensor, root)

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        """Reduce in place on all ranks."""
        channel, flat = self._channel, tensor.view(-1)
        if flat.nbytes * self.size <= SMALL:
            gathered = channel.scratch(flat.nbytes * self.size).view(flat.dtype)
            channel.all_gather(gathered, flat)
            reduction(gathered.chunk(self.size) if flat.numel() else [flat], flat, spare=flat)
            return
        for block in self._blocks(flat):
            counts, offsets, pieces = _shares(block, self.size)
            self._reduce_own_piece(pieces, reduction, pieces[self.rank])
            width = block.element_size()
            channel.all_gather_pieces(block, [c * width for c in counts], [o * width for o in offsets])

    def reduce(self, tensor: Tensor, reduction: Reduction, root: int) -> None:
        """Reduce in place on the root. The tensors of other ranks do not change."""
        self.all_reduce(tensor if self.rank == root else tensor.clone(), reduction)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> None:
        """Reduce `inputs`, one tensor of the output's size for each rank; `output` gets this rank's sum.

        `output` may be the same memory as this rank's own input. It must not overlap the other inputs.
        """
        flat, width = [tensor.view(-1) for tensor in inputs], self._block_elements(output.dtype)
        for start in range(0, output.numel(), width):
            pieces = [tensor[start : start + width] for tensor in flat]
            self._reduce_own_piece(pieces, reduction, output.view(-1)[start : start + width])

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, reduction: Reduction) -> None:
        """Reduce `tensor`, the ranks' pieces in rank order; `output` gets this rank's. The two may share memory."""
        pieces = list(flattened(tensor).tensor_split(self.size))
        if overlap(output, tensor) and not same_memory(output, pieces[self.rank]):
            pieces = [piece.clone() for piece in pieces]
        self.reduce_scatter(output, pieces, reduction)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, *, even: bool) -> None:
        """Gather every rank's `tensor` into `outputs[rank]`. `tensor` may be this rank's output. even: all are of one size."""
        self._exchange(outputs, [tensor] * self.size)

    def all_gather_single(self, output: Tensor, tensor: Tensor) -> None:
        """Gather every rank's `tensor` into `output`, in rank order. The two may share memory."""
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
        """Send `inputs[r]` to rank r, receive from it into `outputs[r]`. Outputs and inputs share no memory."""
        self._exchange(outputs, inputs)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> None:
        """Gather every rank's `tensor` into the root's outputs; other ranks pass no outputs."""
        if self.rank != root:
            self._channel.exchange([(root, tensor)], [])
            return
        self._channel.exchange([], [(rank, output) for rank, output in enumerate(outputs) if rank != root])
        _copy(outputs[root], tensor)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
        """Send the root's `inputs[r]` to rank r; other ranks pass no inputs."""
        if self.rank != root:
            self._channel.exchange([], [(root, output)])
            return
        self._channel.exchange([(rank, tensor) for rank, tensor in enumerate(inputs) if rank != root], [])
        _copy(output, inputs[root])

    def allocate(self, nbytes: int) -> Tensor:
        """Zeros, (nbytes,) uint8, in memory shared by the ranks of a node if possible."""
        with torch.inference_mode(False):  # it outlasts the operation
            return torch.zeros(nbytes, dtype=torch.uint8)

    def free(self) -> None:
        """Free the communicators."""
        self._channel.comm.Free()

    def _exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        others = self._channel.others
        own = partial(_copy, outputs[self.rank], inputs[self.rank])
        self._channel.exchange([(r, inputs[r]) for r in others], [(r, outputs[r]) for r in others], meanwhile=own)

    def _reduce_own_piece(self, pieces: Sequence[Tensor], reduction: Reduction, output: Tensor) -> None:
        """Send `pieces[r]` to rank r and reduce the pieces that arrive here into `output`."""
        own, others = pieces[self.rank], self._channel.others
        scratch = self._channel.scratch(own.nbytes * self.size).view(own.dtype)
        width = own.numel()
        arrived = [own if r == self.rank else scratch[r * width : (r + 1) * width] for r in range(self.size)]
        self._channel.exchange([(r, pieces[r]) for r in others], [(r, arrived[r]) for r in others])
        # The spare memory must be a piece that is not read again: one of the first two, but not this rank's own.
        reduction(arrived, output, spare=arrived[1 if self.rank == 0 and self.size > 1 else 0])

    def _block_elements(self, dtype: torch.dtype) -> int:
        """How many elements one rank reduces at a time."""
        return max(_BLOCK // self.size, _LEAST_PIECE) // dtype.itemsize

    def _blocks(self, flat: Tensor) -> Iterator[Tensor]:
        width = self._block_elements(flat.dtype) * self.size
        return (flat[start : start + width] for start in range(0, flat.numel(), width))


def _copy(output: Tensor, tensor: Tensor) -> None:
    if not same_memory(output, tensor):
        output.view(-1).copy_(tensor.view(-1))


def _shares(block: Tensor, size: int) -> tuple[list[int], list[int], list[Tensor]]:
    """The ranks' shares of a block: counts and offsets in elements, and the pieces. The last pieces may be empty."""
    elements = block.numel()
    width = -(-elements // size)
    width = -(-width // _ALIGNMENT) * _ALIGNMENT
    offsets = [min(rank * width, elements) for rank in range(size)]
    counts = [min(width, elements - offset) for offset in offsets]
    return counts, offsets, [block[o : o + c] for o, c in zip(offsets, counts, strict=True)]
