"""Passes data between the ranks of a group through the shared memory of their node.

Work goes in rounds: every rank writes into its outbox, all `sync`, every rank reads the others' outboxes. Each rank uses
two outboxes in turn: while a slow rank still reads the outboxes of one round, the others already write the next. No rank
can be two rounds ahead. Tensors allocated here need no outbox: the others read them in place. Other large tensors are
copied from their owner's memory, if the system allows it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.mpi.library import MPI
from hpctrain.mpi.transfer.peers import Peers, shared_memory
from hpctrain.mpi.transfer.watch import OperationWatch

OUTBOX = 16 * 2**20
"""Bytes that a rank can pass on in one round. Large, because every round costs a time slice on a busy machine, and because
cores without a common cache pass fresh lines more slowly than memory does. Pages never written are never allocated."""

_LINE = 128  # bytes: the words that one rank writes and others poll have their own pair of cache lines
# Words of a line: the last round that the rank reached; then, by the round's parity, its operation and its tensor's place.
_ROUND, _DESCRIPTION, _PLACE = 0, 1, 3
# The bits above these give the allocation, from 1; if they are 0, the place is an address.
_OFFSET_BITS = 48
# cached views of the outboxes: making a view takes a microsecond, which would slow down a small message
_MOST_VIEWS = 64


class NodeMemory:
    """The shared memory of some ranks. Used by one thread at a time."""

    def __init__(self, comm: MPI.Comm, parts: list[Tensor], peers: Peers | None, watch: OperationWatch) -> None:
        """parts: each rank's memory, for its line and its outboxes. peers: None if ranks cannot read each other's memory."""
        self.rank, self.size, self.comm = comm.rank, comm.size, comm
        self._peers, self._watch = peers, watch
        self._round = 0
        self._lines = [part[:_LINE].numpy().data.cast("q") for part in parts]
        self._outboxes: list[tuple[Tensor, ...]] = [part[_LINE:].view(2, OUTBOX).unbind() for part in parts]
        self._views: dict[tuple[torch.dtype, int, int, int], list[Tensor]] = {}
        self._allocated: list[list[Tensor]] = []  # one tensor for each rank
        self._fence = threading.Lock()
        self._fence.acquire()

    @staticmethod
    def create(comm: MPI.Comm, watch: OperationWatch) -> NodeMemory | None:
        """The node of ranks that can share memory according to MPI; None if they cannot after all. Collective."""
        parts = shared_memory(comm, _LINE + 2 * OUTBOX)
        return None if parts is None else NodeMemory(comm, parts, Peers.create(comm), watch)

    def allocate(self, nbytes: int) -> Tensor | None:
        """Zeros that the others can read in place, (nbytes,) uint8, the same size on each rank. Collective."""
        parts = shared_memory(self.comm, nbytes)
        if parts is None:
            return None
        self._allocated.append(parts)
        return parts[self.rank]

    def place(self, tensor: Tensor) -> int:
        """The place of a plain tensor, for `sync`: in the allocated memory, or else its address."""
        address = tensor.data_ptr()
        for index, parts in enumerate(self._allocated, 1):
            own = parts[self.rank]
            offset = address - own.data_ptr()
            if offset >= 0 and offset + tensor.nbytes <= own.nbytes:
                return index << _OFFSET_BITS | offset
        return address if address >> _OFFSET_BITS == 0 else 0

    @staticmethod
    def is_allocated(*places: int) -> bool:
        """Whether these are places in the allocated memory."""
        return all(place >> _OFFSET_BITS for place in places)

    @property
    def places(self) -> list[int]:
        """The ranks' places at the last `sync`; valid until the next one."""
        parity = self._round % 2
        return [line[_PLACE + parity] for line in self._lines]

    def reaches(self, places: Sequence[int]) -> bool:
        """Whether `fetch` can copy from all of these places."""
        return self.is_allocated(*places) or (self._peers is not None and 0 not in places)

    def at(self, rank: int, place: int, like: Tensor) -> Tensor:
        """The tensor of a rank at a place in the allocated memory, flat, of the size and dtype of `like`."""
        offset = place & (1 << _OFFSET_BITS) - 1
        return self._allocated[(place >> _OFFSET_BITS) - 1][rank][offset : offset + like.nbytes].view(like.dtype)

    def fetch(self, rank: int, place: int, into: Tensor) -> None:
        """Fill a plain, flat tensor with the bytes at that rank's place."""
        if self.is_allocated(place):
            into.copy_(self.at(rank, place, into))
        elif self._peers is not None:
            self._peers.read(rank, place, into)

    @property
    def outbox(self) -> Tensor:
        """This rank's outbox for the next `sync`, (OUTBOX,) uint8."""
        return self._outboxes[self.rank][(self._round + 1) % 2]

    def read(self, rank: int) -> Tensor:
        """The outbox that `rank` filled before the last `sync`, (OUTBOX,) uint8; valid until the next one."""
        return self._outboxes[rank][self._round % 2]

    def boxes(self, dtype: torch.dtype, elements: int, first: int = 0) -> list[Tensor]:
        """The outboxes of all ranks at the next `sync`, this rank's own included: `elements` of that dtype from `first`
        on, flat."""
        side = (self._round + 1) % 2
        views = self._views.get((dtype, elements, first, side))
        if views is None:
            if len(self._views) == _MOST_VIEWS:
                self._views.clear()
            views = [pair[side].view(dtype)[first : first + elements] for pair in self._outboxes]
            self._views[dtype, elements, first, side] = views
        return views

    def sync(self, place: int = 0) -> None:
        """Return when every rank is here. place: of the tensor that the others will read from this rank.

        The first call in an operation checks that the operation is the same on all ranks.
        """
        self._round += 1
        number, parity, mine = self._round, self._round % 2, self._lines[self.rank]
        mine[_DESCRIPTION + parity] = self._watch.operation.description
        mine[_PLACE + parity] = place
        self._order_memory()
        mine[_ROUND] = number
        awaited = [line for line in self._lines if line[_ROUND] < number]

        def arrived() -> bool:
            while awaited and awaited[-1][_ROUND] >= number:
                awaited.pop()
            return not awaited

        if awaited:
            self._watch.wait(arrived)
        self._order_memory()
        if not self._watch.all_here:
            self._watch.check([line[_DESCRIPTION + parity] for line in self._lines])

    def _order_memory(self) -> None:
        """A fence: other ranks see earlier writes before later ones; likewise for reads.

        x86 needs no fence. On ARM and POWER, releasing and acquiring a lock is a fence in both directions.
        """
        self._fence.release()
        self._fence.acquire()
