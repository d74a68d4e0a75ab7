"""The building blocks of a group's operations. All tensors are plain (see transfer/buffers.py) and checked."""

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
        """Before its data moves, let the ranks tell each other what they called, if `operation` asks for it or it is
        cheap against the data. OperationMismatchError where they differ."""

    def barrier(self) -> None:
        """Return when every rank is here."""

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """The root's bytes to all."""

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        """Reduce in place on all ranks."""

    def reduce(self, tensor: Tensor, reduction: Reduction, root: int) -> None:
        """Reduce in place on the root. The others' tensors stay as they are."""

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> None:
        """Reduce `inputs`, one tensor of the output's size for each rank; `output` gets the own one.

        `output` may be the same memory as the own input, and must not overlap the others.
        """

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, reduction: Reduction) -> None:
        """Reduce `tensor`, the ranks' pieces one after the other; `output` gets the own one. They may share memory."""

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, *, even: bool) -> None:
        """All ranks' `tensor` into one output for each; it may be this rank's output. even: all are of one size."""

    def all_gather_single(self, output: Tensor, tensor: Tensor) -> None:
        """All ranks' `tensor` one after the other into `output`; they may share memory."""

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, even: bool) -> None:
        """`inputs[r]` to rank r, whose own comes into `outputs[r]`. Outputs and inputs share no memory."""

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> None:
        """All ranks' `tensor` into the root's outputs; others pass none."""

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
        """The root's `inputs[r]` to rank r; others pass none."""

    def sparse_all_reduce(self, tensor: Tensor, op: ReduceOp | ReduceOp.RedOpType) -> None:
        """Replace a sparse COO tensor by the coalesced sum of all ranks', added in rank order."""

    def allocate(self, nbytes: int) -> Tensor:
        """Zeros, (nbytes,) uint8, in memory that the ranks of a node share where there is any."""

    def free(self) -> None:
        """Give the communicators back."""
