"""Watches the running operation of a group: its time limit, and the missing ranks when it times out.

Waiting follows one of three policies. They differ in the processor time that they take from computation:

- some ranks may be missing: test, yield, and sleep for longer and longer;
- all ranks are here and the caller drives: test and yield, since any sleep would delay the transfer;
- all ranks are here and the worker thread drives: sleep briefly, since backward needs the core more than the transfer.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hpctrain.mpi.errors import CommunicationTimeoutError, OperationMismatchError
from hpctrain.mpi.transfer.operation import Operation, disagreement
from hpctrain.mpi.transfer.presence import PUBLISH_AFTER, Presence
from hpctrain.mpi.transfer.waiting import Patience, wait_until


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
        if not wait_until(test, self.deadline, patience, notice_after=PUBLISH_AFTER, notice=self._publish):
            raise self.overdue(self.operation, self._number, self.operation.timeout)

    def check(self, descriptions: list[int]) -> None:
        """All ranks are here. Raises OperationMismatchError unless all called the same. descriptions: in rank order."""
        self.all_here = True
        mine = self.operation.description
        if any(description != mine for description in descriptions):
            ranks = [self.presence.global_rank(rank) for rank in range(len(descriptions))]
            raise OperationMismatchError(
                f"the ranks of {self.presence.group} called different operations: {disagreement(descriptions, ranks)}; "
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
