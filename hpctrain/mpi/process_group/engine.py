"""Runs a group's collective operations one after the other, in the order in which they were submitted, and has their handles.

If nothing is queued before it, an operation runs in the thread that waits for it, which saves two thread switches.
Otherwise it runs in the group's worker thread, so that communication overlaps with the backward pass.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.futures import Future

from hpctrain.base import accounting
from hpctrain.base.torch_groups import PythonWork
from hpctrain.base.torch_private import DisableTorchDispatch
from hpctrain.mpi.collectives.network import OverNetwork
from hpctrain.mpi.errors import CommunicationError, OperationMismatchError
from hpctrain.mpi.library import MPI
from hpctrain.mpi.transfer.watch import Operation, OperationWatch, describe

# After its deadline an operation needs this long to find the missing ranks; then the waiter gives up.
_GRACE = 5.0  # seconds

Run = Callable[[OverNetwork], None]
"""Performs an operation; the calling thread or the group's worker calls it once."""

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def in_flight() -> list[str]:
    """The operations of all groups that are running or queued here, for messages."""
    return [operation for engine in list(_engines) for operation in engine.in_flight()]


class Engine:
    """The order of one group's collectives, and the thread that runs them in the background."""

    def __init__(self, collectives: OverNetwork, watch: OperationWatch, name: str) -> None:
        self._collectives, self._watch = collectives, watch
        self._name, self.group = name, watch.presence.group_name
        self._changed = threading.Condition()
        self._queue: deque[MPIWork] = deque()
        self._running: MPIWork | None = None
        self._worker: threading.Thread | None = None
        self._stopped = False
        self._submitted = 0
        # broken: why the group can no longer be used. abandoned: a caller gave up on an operation that still runs.
        self.broken: BaseException | None = None
        self.abandoned = False
        _engines.add(self)

    def in_flight(self) -> list[str]:
        """The operations that are running or queued."""
        works = [work for work in (self._running, *self._queue) if work is not None]
        return [
            f"{describe(work.operation.description)} (number {work.number} of {self._watch.presence.group})"
            for work in works
        ]

    def submit(self, operation: Operation, run: Run, result: Any, *, asynchronous: bool) -> MPIWork:
        """Queue an operation, or run it at once if the caller will wait and no operation is before it."""
        if self.broken is not None:
            raise CommunicationError(f"{self._name} cannot be used after an earlier failure: {self.broken}")
        with self._changed:
            if self._stopped:
                raise CommunicationError(f"{self._name} was destroyed; make a new group")
            self._submitted += 1
            work = MPIWork(self, operation, run, result, self._submitted)
            here = not asynchronous and self._running is None and not self._queue
            if here:
                self._running = work
            else:
                self._queue.append(work)
                if self._worker is None:
                    self._worker = threading.Thread(target=self._work, name=self._name, daemon=True)
                    self._worker.start()
                self._changed.notify_all()
        if here:
            start = time.perf_counter()
            self._run(work, in_worker=False)
            accounting.record_wait(self.group, operation.name, time.perf_counter() - start)
        return work

    def wait(self, work: MPIWork, limit: float | None) -> None:
        """Block until `work` has finished, for at most `limit` seconds (None: as long as its operation may take)."""
        if limit is None and self._take(work):
            self._run(work, in_worker=False)
            return
        give_up = time.perf_counter() + limit if limit is not None else math.inf
        while not work.join(min(1.0, give_up - time.perf_counter())):
            now = time.perf_counter()
            if now > give_up:
                self.abandoned = True
                raise self._watch.overdue(work.operation, work.number, limit or 0.0)
            running = self._running
            if running is not None and now > self._watch.deadline + _GRACE:
                # MPI holds the operation and cannot cancel it: the group is unusable.
                operation = running.operation
                self.broken = self.broken or self._watch.overdue(operation, running.number, operation.timeout)
                raise self.broken

    def drain(self) -> None:
        """Wait until all submitted operations have finished or failed."""
        while True:
            with self._changed:
                work = self._running or (self._queue[-1] if self._queue else None)
            if work is None or self.broken is not None:
                return
            try:
                self.wait(work, None)
            except Exception:
                continue

    def stop(self) -> None:
        """End the threads. No operation can be submitted afterwards."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._worker is not None:
            self._worker.join()  # Python kills threads that outlive it, which C++ takes for a crash

    def _take(self, work: MPIWork) -> bool:
        with self._changed:
            if self._running is None and self._queue and self._queue[0] is work:
                self._running = self._queue.popleft()
                return True
        return False

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._running is not None or not self._queue:
                    if self._stopped:
                        return
                    self._changed.wait()
                work = self._running = self._queue.popleft()
            self._run(work, in_worker=True)
            del work

    def _run(self, work: MPIWork, *, in_worker: bool) -> None:
        operation = work.operation
        error: BaseException | None = None
        start = time.perf_counter()
        try:
            if self.broken is not None:
                raise CommunicationError(f"{operation.name} was not started: {self.broken}")
            # The caller's dispatch modes (selective checkpointing, say) must not see the internals of an operation.
            with DisableTorchDispatch():
                self._watch.start(operation, work.number, in_worker=in_worker)
                self._collectives.begin(operation)
                # In the caller's mode, cached buffers would keep the mode of their first operation, and a worker could not
                # write to inference tensors. Inference mode can write to both kinds.
                with torch.inference_mode():
                    work.run(self._collectives)
        except OperationMismatchError as mismatch:
            error = mismatch  # every rank saw it before any data moved: the group is still in step
        except MPI.Exception as failure:
            error = CommunicationError(
                f"{operation.name} of {self._name} failed in MPI: {failure.Get_error_string()}; the ranks may have "
                "passed different sizes, or one of them has ended"
            )
            self.broken = error
        except BaseException as failure:
            error = failure
            self.broken = self.broken or failure
        accounting.record(self.group, operation.name, operation.nbytes, time.perf_counter() - start)
        with self._changed:
            self._running = None
            if self._queue:
                self._changed.notify_all()
        work.finish(error)


class MPIWork(PythonWork):
    """The handle of the group's `number`-th collective operation. Thread-safe."""

    def __init__(self, engine: Engine, operation: Operation, run: Run, result: Any, number: int) -> None:
        """result: the value of `result()` and of the future."""
        super().__init__()
        self.operation, self.run, self.number = operation, run, number
        self._engine, self._result = engine, result
        # A lock, held until the operation has finished, is cheaper than an Event.
        self._running = threading.Lock()
        self._running.acquire()
        self._future: Future[Any] | None = None

    def finish(self, error: BaseException | None) -> None:
        """Called once, by the thread that ran the operation."""
        self.error = error
        self.done = True
        self._running.release()

    # The names below are torch's.

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the operation has finished, or raise its error.

        timeout: zero means the group's timeout.
        """
        if not self.done:
            start = time.perf_counter()
            limit = timeout.total_seconds()
            self._engine.wait(self, limit if limit > 0 else None)
            accounting.record_wait(self._engine.group, self.operation.name, time.perf_counter() - start)
        if self.error is not None:
            raise self.error
        return True

    def join(self, seconds: float) -> bool:
        """Wait at most `seconds`; return whether the operation has finished."""
        if self._running.acquire(timeout=max(seconds, 0.0)):
            self._running.release()
        return self.done

    def is_completed(self) -> bool:
        return self.done

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Future[Any]:
        """A future of the output tensors."""
        if self._future is None:
            self._future = Future()
            # In a thread of its own: callbacks may wait for further operations, and the worker must run those.
            threading.Thread(target=settle, args=(self._future, self.wait, self.result)).start()
        return self._future


def settle(future: Future[Any], wait: Callable[[], bool], result: Callable[[], Any]) -> None:
    """Set a future to the result or the error of a wait."""
    try:
        wait()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result())
