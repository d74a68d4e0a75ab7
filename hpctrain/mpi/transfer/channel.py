"""A communicator and the basic transfers over it from which collectives are built.

Every MPI call here is nonblocking. The wait for it runs under the watch, which enforces the time limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hpctrain.mpi.library import MPI, highest_tag
from hpctrain.mpi.transfer.buffers import message
from hpctrain.mpi.transfer.watch import OperationWatch

SMALL = 256 * 1024
"""Bytes over all ranks up to which a message is gathered in full: one exchange instead of two."""


class Channel:
    """A communicator, used by one thread at a time."""

    def __init__(self, comm: MPI.Comm, watch: OperationWatch) -> None:
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self._watch = watch
        self.others = [rank for rank in range(comm.size) if rank != comm.rank]
        # The highest tag is reserved for collectives; users' point-to-point messages have the others.
        self._tag = highest_tag()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def scratch(self, nbytes: int) -> Tensor:
        """Memory of this channel, (nbytes,) uint8, valid until the next call. Cached, since fresh pages are slow."""
        if self._scratch.numel() < nbytes:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8)
        return self._scratch[:nbytes]

    def barrier(self) -> None:
        """Return when every rank is here."""
        self._wait([self.comm.Ibarrier()])

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy the root's bytes to all ranks."""
        self._wait([self.comm.Ibcast(message(tensor), root)])

    def all_gather(self, output: Tensor, tensor: Tensor | None) -> None:
        """Gather equal pieces into `output`, (size * piece,), below 2 GiB. tensor: None if this rank's is in place."""
        memory = MPI.buffer.fromaddress(output.data_ptr(), output.nbytes)
        source = MPI.IN_PLACE if tensor is None else message(tensor)
        self._wait([self.comm.Iallgather(source, [memory, output.nbytes // self.size, MPI.BYTE])])

    def all_gather_pieces(self, output: Tensor, counts: Sequence[int], offsets: Sequence[int]) -> None:
        """Gather unequal pieces (in bytes); each rank's own is already in place in its `output` (below 2 GiB)."""
        memory = MPI.buffer.fromaddress(output.data_ptr(), output.nbytes)
        self._wait([self.comm.Iallgatherv(MPI.IN_PLACE, [memory, (counts, offsets), MPI.BYTE])])

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Exchange plain tensors of any size with single ranks, at most one in each direction per rank.

        meanwhile: called during the transfer.
        """
        requests = [self.comm.Irecv(message(t), rank, self._tag) for rank, t in receives if t.nbytes]
        requests += [self.comm.Isend(message(t), rank, self._tag) for rank, t in sends if t.nbytes]
        if meanwhile is not None:
            meanwhile()
        if requests:
            self._wait(requests)

    def meet(self) -> None:
        """Wait until every rank is in this operation, and check that it is the same on all."""
        mine = self._watch.operation.description.to_bytes(8, "little")
        descriptions = bytearray(8 * self.size)
        self._wait([self.comm.Iallgather([mine, 8, MPI.BYTE], [descriptions, 8, MPI.BYTE])])
        self._watch.check([int.from_bytes(descriptions[8 * r : 8 * r + 8], "little") for r in range(self.size)])

    def _wait(self, requests: list[MPI.Request]) -> None:
        if self._watch.all_here and self._watch.in_worker:
            # MPI's own wait needs no Python, so it never takes the GIL from the computing thread.
            MPI.Request.Waitall(requests)
        else:
            self._watch.wait(requests[0].Test if len(requests) == 1 else partial(MPI.Request.Testall, requests))
