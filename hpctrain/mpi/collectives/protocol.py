"""The interface of a group's collectives. All tensors are plain (see transfer/buffers.py) and checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch.distributed import ReduceOp

from hpctrain.mpi.collectives.arithmetic import Reduction
from hpctrain.mpi.transfer.operation import Operation

SMALL = 256 * 1024
"""Bytes over all ranks up to which a message is gathered in full: one exchange instead of two."""


class Collectives(Protocol):
    """The collectives of one group. One thread at a time uses them; all ranks call the same ones in the same order."""

    rank: int
    size: int

    def begin(self, operation: Operation) -> None:
        """Compare the operations that the ranks called, before data moves, if `operation` asks for it or if it is cheap
        compared with the data. Raises OperationMismatchError if they differ."""

    def barrier(self) -> None:
        """Return when every rank is here."""

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy the root's bytes to all ranks."""

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        """Reduce in place on all ranks."""

    def reduce(self, tensor: Tensor, reduction: Reduction, root: int) -> None:
        """Reduce in place on the root. The tensors of other ranks do not change."""

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> None:
        """Reduce `inputs`, one tensor of the output's size for each rank; `output` gets this rank's sum.

        `output` may be the same memory as this rank's own input. It must not overlap the other inputs.
        """

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, reduction: Reduction) -> None:
        """Reduce `tensor`, the ranks' pieces in rank order; `output` gets this rank's. The two may share memory."""

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, *, even: bool) -> None:
        """Gather every rank's `tensor` into `outputs[rank]`. `tensor` may be this rank's output. even: all are of one size."""

    def all_gather_single(self, output: Tensor, tensor: Tensor) -> None:
        """Gather every rank's `tensor` into `output`, in rank order. The two may share memory."""

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, even: bool) -> None:
        """Send `inputs[r]` to rank r, receive from it into `outputs[r]`. Outputs and inputs share no memory."""

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> None:
        """Gather every rank's `tensor` into the root's outputs; other ranks pass no outputs."""

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
        """Send the root's `inputs[r]` to rank r; other ranks pass no inputs."""

    def sparse_all_reduce(self, tensor: Tensor, op: ReduceOp | ReduceOp.RedOpType) -> None:
        """Replace a sparse COO tensor by the coalesced sum of all ranks' tensors, added in rank order."""

    def allocate(self, nbytes: int) -> Tensor:
        """Zeros, (nbytes,) uint8, in memory shared by the ranks of a node if possible."""

    def free(self) -> None:
        """Free the communicators."""
