"""The handle of a submitted operation, which torch.distributed waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed.distributed_c10d import Work
from torch.futures import Future

from hpctrain.base import accounting
from hpctrain.mpi.collectives.protocol import Collectives
from hpctrain.mpi.transfer.operation import Operation

Run = Callable[[Collectives], None]
"""Performs an operation; the calling thread or the group's worker calls it once."""


class Driver(Protocol):
    """Runs submitted operations of the group of this name."""

    group: str

    def wait(self, work: MPIWork, limit: float | None) -> None:
        """Block until `work` has finished, for at most `limit` seconds (None: as long as its operation may take)."""

    def complete(self, work: MPIWork, future: Future[Any]) -> None:
        """Give `future` the outcome of `work`."""


class MPIWork(Work):
    """The handle of the group's `number`-th collective operation. Thread-safe."""

    def __init__(self, driver: Driver, operation: Operation, run: Run, result: Any, number: int) -> None:
        """result: the value of `result()` and of the future."""
        super().__init__()
        self.operation, self.run, self.number = operation, run, number
        self._driver, self._result = driver, result
        self._done = False
        self._error: BaseException | None = None
        # A lock, held until the operation has finished, is cheaper than an Event.
        self._running = threading.Lock()
        self._running.acquire()
        self._future: Future[Any] | None = None

    def finish(self, error: BaseException | None) -> None:
        """Called once, by the thread that ran the operation."""
        self._error = error
        self._done = True
        self._running.release()

    # The names below are torch's.

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the operation has finished, or raise its error.

        timeout: zero means the group's timeout.
        """
        if not self._done:
            start = time.perf_counter()
            limit = timeout.total_seconds()
            self._driver.wait(self, limit if limit > 0 else None)
            accounting.record_wait(self._driver.group, self.operation.name, time.perf_counter() - start)
        if self._error is not None:
            raise self._error
        return True

    def join(self, seconds: float) -> bool:
        """Wait at most `seconds`; return whether the operation has finished."""
        if self._running.acquire(timeout=max(seconds, 0.0)):
            self._running.release()
        return self._done

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> Any:
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future[Any]:
        """A future of the output tensors. Its callbacks run in a thread of their own."""
        if self._future is None:
            self._future = Future()
            self._driver.complete(self, self._future)
        return self._future


def settle(future: Future[Any], wait: Callable[[], bool], result: Callable[[], Any]) -> None:
    """Set a future to the result or the error of a wait."""
    try:
        wait()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result())
