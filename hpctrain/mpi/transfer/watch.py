"""Watches the running operation of a group: whether all ranks called the same, its time limit, and the missing ranks when it
times out.

Waiting follows one of three policies. They differ in the processor time that they take from computation:

- some ranks may be missing: test, yield, and sleep for longer and longer;
- all ranks are here and the caller drives: test and yield, since any sleep would delay the transfer;
- all ranks are here and the worker thread drives: sleep briefly, since backward needs the core more than the transfer.

To name missing ranks, nothing is exchanged on the fast path. A rank that has waited for _PUBLISH_AFTER seconds writes its position
(operation number and name) into the group's store. A rank whose time is up reads all positions.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch.distributed.distributed_c10d import Store

from hpctrain.base.errors import name_ranks
from hpctrain.mpi.errors import CommunicationTimeoutError, OperationMismatchError
from hpctrain.mpi.transfer.waiting import Patience, wait_until

_PUBLISH_AFTER = 1.0  # seconds of waiting
# A rank that enters just before our timeout publishes _PUBLISH_AFTER later, so we listen a little longer.
_LISTEN = _PUBLISH_AFTER + 0.5  # seconds

NAMES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "allocate",
)
_DTYPES = tuple(dict.fromkeys(sorted((v for v in vars(torch).values() if isinstance(v, torch.dtype)), key=str)))
_SIZE_BITS = 47
_NAME_NUMBERS = {name: number for number, name in enumerate(NAMES)}
_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}


@dataclass(slots=True)
class Operation:
    """A collective operation of a group.

    nbytes: this rank's input. agreed_bytes: a size that must be equal on all ranks; 0 if it may differ.
    meet_first: all ranks exchange a description before any data moves, whatever the size. This distinguishes a mistake
    from a slow rank and lets a rank sleep until the others are there.
    """

    name: str
    nbytes: int
    agreed_bytes: int
    dtype: torch.dtype
    meet_first: bool
    timeout: float

    @property
    def description(self) -> int:
        """Name, dtype and agreed size in one 63-bit number."""
        kind = _NAME_NUMBERS[self.name] << 8 | _DTYPE_NUMBERS[self.dtype]
        return kind << _SIZE_BITS | self.agreed_bytes


def describe(description: int) -> str:
    """Operation.description in words."""
    kind, nbytes = description >> _SIZE_BITS, description & (1 << _SIZE_BITS) - 1
    dtype = str(_DTYPES[kind & 255]).removeprefix("torch.")
    return f"{NAMES[kind >> 8]}({dtype}{f', {nbytes} bytes' if nbytes else ''})"


class Presence:
    """The positions of a group's ranks, kept in the group's store.

    ranks: the global rank of each group rank.
    """

    def __init__(self, store: Store, group_rank: int, ranks: Sequence[int], group_name: str) -> None:
        self._store = store
        self._group_rank = group_rank
        self.ranks = ranks
        self.group_name = group_name

    @property
    def here(self) -> str:
        """This rank, for messages."""
        return f"rank {self.ranks[self._group_rank]} ({socket.gethostname()})"

    @property
    def group(self) -> str:
        """This group, for messages."""
        return f"group {self.group_name!r} ({name_ranks(self.ranks)})"

    def publish(self, number: int, name: str) -> None:
        """Publish that this rank waits in operation `number`, called `name`."""
        with suppress(RuntimeError):  # the store's host has left, as the report of the timeout will say
            self._store.set(f"position/{self._group_rank}", f"{number} {name}")

    def roll_call(self, number: int, name: str) -> str:
        """A description of the ranks that have not entered operation `number`. Waits up to _LISTEN seconds for late ones."""
        self.publish(number, name)
        give_up = time.monotonic() + _LISTEN
        try:
            while True:
                positions = self._read()
                absent = [rank for rank in range(len(self.ranks)) if positions.get(rank, (0, ""))[0] < number]
                if not absent or time.monotonic() > give_up:
                    break
                time.sleep(0.1)
        except RuntimeError as error:
            return (
                f"which ranks are missing is unknown: the store on rank 0 does not answer ({error}), it may have ended"
            )
        clauses = [f"{name_ranks([self.ranks[rank] for rank in absent])} did not enter it"] if absent else []
        clauses += [
            f"{name_ranks([self.ranks[rank]])} waits in {other} (number {place}) instead"
            for rank, (place, other) in positions.items()
            if place >= number and (place, other) != (number, name)
        ]
        return "; ".join(clauses) or "all ranks entered it, but the transfer did not finish"

    def _read(self) -> dict[int, tuple[int, str]]:
        """The positions of the group's ranks, as far as they are known."""
        positions = {}
        for group_rank in range(len(self.ranks)):
            key = f"position/{group_rank}"
            if self._store.check([key]):
                number, name = self._store.get(key).decode().split(" ", 1)
                positions[group_rank] = (int(number), name)
        return positions


class OperationWatch:
    """The running operation of one group; there is one at a time."""

    def __init__(self, presence: Presence) -> None:
        self.presence = presence
        self.operation: Operation
        self.in_worker = False
        self.all_here = False
        """Whether every rank is known to be in this operation."""
        self.deadline = 0.0
        """The time at which the running operation is overdue, on time.perf_counter()."""
        self._number = 0

    def start(self, operation: Operation, number: int, *, in_worker: bool) -> None:
        """The group's `number`-th operation begins."""
        self.operation, self._number, self.in_worker = operation, number, in_worker
        self.all_here = False
        self.deadline = time.perf_counter() + operation.timeout

    def wait(self, test: Callable[[], bool]) -> None:
        """Return when `test` is true. Raises CommunicationTimeoutError when the operation's time is up."""
        here = Patience.SHORT if self.in_worker else Patience.NONE
        patience = here if self.all_here else Patience.LONG
        if not wait_until(test, self.deadline, patience, notice_after=_PUBLISH_AFTER, notice=self._publish):
            raise self.overdue(self.operation, self._number, self.operation.timeout)

    def check(self, descriptions: list[int]) -> None:
        """All ranks are here. Raises OperationMismatchError unless all called the same. descriptions: in rank order."""
        self.all_here = True
        mine = self.operation.description
        if any(description != mine for description in descriptions):
            calls = (f"rank {self.presence.ranks[rank]} {describe(call)}" for rank, call in enumerate(descriptions))
            raise OperationMismatchError(
                f"the ranks of {self.presence.group} called different operations: {', '.join(calls)}; "
                "all must call the same, in the same order, with the same dtype and size"
            )

    def overdue(self, operation: Operation, number: int, seconds: float) -> CommunicationTimeoutError:
        """The error that names the operation and the missing ranks. Finding them takes a second or two."""
        missing = self.presence.roll_call(number, operation.name)
        return CommunicationTimeoutError(
            f"{operation.name} (number {number} of {self.presence.group}) did not finish within "
            f"{seconds:g} s on {self.presence.here}: {missing}. Look at what the missing ranks do "
            "(their logs, or py-spy dump), or raise the timeout if they are only slow"
        )

    def _publish(self) -> None:
        self.presence.publish(self._number, self.operation.name)
