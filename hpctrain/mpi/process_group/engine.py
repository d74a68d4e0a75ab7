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
from queue import SimpleQueue
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work
from torch.futures import Future

from hpctrain.base import accounting
from hpctrain.base.torch_private import DisableTorchDispatch
from hpctrain.mpi.collectives.network import OverNetwork
from hpctrain.mpi.errors import CommunicationError, OperationMismatchError
from hpctrain.mpi.library import MPI
from hpctrain.mpi.transfer.watch import Operation, OperationWatch

# After its deadline an operation needs this long to find the missing ranks; then the waiter gives up.
_GRACE = 5.0  # seconds

Run = Callable[[OverNetwork], None]
"""Performs an operation; the calling thread or the group's worker calls it once."""

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def in_flight() -> list[str]:
    """The operations of all groups that are running or queued here, for messages."""
    return [told for engine in list(_engines) for told in engine.in_flight()]


class Engine:
    """The order of one group's collectives, and the thread that runs them in the background."""

    def __init__(self, collectives: OverNetwork, watch: OperationWatch, name: str) -> None:
        self._collectives, self._watch = collectives, watch
        self._name, self.group = name, watch.presence.group_name
        self._changed = threading.Condition()
        self._queue: deque[MPIWork] = deque()
        self._running: MPIWork | None = None
        self._threads: list[threading.Thread] = []
        self._has_worker = False
        self._stopped = False
        self._submitted = 0
        self._completions: SimpleQueue[tuple[MPIWork, Future[Any]] | None] | None = None
        # broken: why the group can no longer be used. abandoned: a caller gave up on an operation that still runs.
        self.broken: BaseException | None = None
        self.abandoned = False
        _engines.add(self)

    def in_flight(self) -> list[str]:
        """The operations that are running or queued."""
        works = [work for work in (self._running, *self._queue) if work is not None]
        return [f"{work.operation.told} (number {work.number} of {self._watch.presence.group})" for work in works]

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
                self._wake_worker()
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

    def complete(self, work: MPIWork, future: Future[Any]) -> None:
        """Give `future` the outcome of `work`.

        The callbacks of a future may wait for further operations. So they do not run in the worker, which must run those
        operations. And if a callback asks for a future, that future's callbacks do not queue behind it.
        """
        if self._completions is None:
            self._completions = SimpleQueue()
            self._start_thread(self._settle, f"{self._name} futures")
        if threading.current_thread().name == f"{self._name} futures":
            threading.Thread(target=settle, args=(future, work.wait, work.result), daemon=True).start()
        else:
            self._completions.put((work, future))

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
        if self._completions is not None:
            self._completions.put(None)
        # Python kills threads that outlive it, which C++ takes for a crash: wait for their end.
        for thread in self._threads:
            thread.join()

    def _take(self, work: MPIWork) -> bool:
        with self._changed:
            if self._running is None and self._queue and self._queue[0] is work:
                self._running = self._queue.popleft()
                return True
        return False

    def _wake_worker(self) -> None:
        if not self._has_worker:
            self._has_worker = True
            self._start_thread(self._work, self._name)
        self._changed.notify_all()

    def _start_thread(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

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

    def _settle(self) -> None:
        assert self._completions is not None
        while (item := self._completions.get()) is not None:
            work, future = item
            settle(future, work.wait, work.result)
            del item, work, future


class MPIWork(Work):
    """The handle of the group's `number`-th collective operation. Thread-safe."""

    def __init__(self, engine: Engine, operation: Operation, run: Run, result: Any, number: int) -> None:
        """result: the value of `result()` and of the future."""
        super().__init__()
        self.operation, self.run, self.number = operation, run, number
        self._engine, self._result = engine, result
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
            self._engine.wait(self, limit if limit > 0 else None)
            accounting.record_wait(self._engine.group, self.operation.name, time.perf_counter() - start)
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
            self._engine.complete(self, self._future)
        return self._future


def settle(future: Future[Any], wait: Callable[[], bool], result: Callable[[], Any]) -> None:
    """Set a future to the result or the error of a wait."""
    try:
        wait()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result())
