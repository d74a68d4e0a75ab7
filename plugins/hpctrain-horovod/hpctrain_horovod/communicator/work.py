"""The handle of a collective that Horovod runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import Work
from torch.futures import Future

from hpctrain.api import record_wait

_PAUSE = 1e-4  # seconds between two looks; Horovod itself looks every millisecond


class HorovodWork(Work):
    """Waits for Horovod's handles, then finishes the result. Thread-safe."""

    def __init__(
        self, hvd: Any, of: tuple[str, str], started: Mapping[str, int], finish: Callable[[list[Any]], None], result: Any,
        timeout: float, running: dict[str, HorovodWork],
    ) -> None:  # fmt: skip
        """of: the names of the group and the operation. started: the handles by name. finish: called once with what they give.

        result: the value of the future. running: the unfinished operations by name, this one among them until it is done.
        """
        super().__init__()
        running.update(dict.fromkeys(started, self))
        self._running = running
        self._hvd, self._of, self._started, self._finish, self._result = hvd, of, started, finish, result
        self._timeout = timeout
        self._lock = threading.Lock()
        self._done = False
        self._error: BaseException | None = None

    # The names below are torch's.

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the operation has finished, or raise its error. timeout: zero means the group's timeout."""
        with self._lock:
            if not self._done:
                try:
                    self._await(timeout.total_seconds() or self._timeout)
                    self._finish([self._hvd.synchronize(handle) for handle in self._started.values()])
                except BaseException as error:
                    self._error = error
                self._done = True
                for name in self._started:
                    self._running.pop(name, None)
                self._started, self._finish = {}, lambda _: None  # they hold tensors
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        if self._done:
            return True
        if not self._lock.acquire(blocking=False):  # another thread waits: its handles may be gone already
            return False
        try:
            return all(map(self._hvd.poll, self._started.values()))
        finally:
            self._lock.release()

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> Any:
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future[Any]:
        """A future of the output tensors."""
        future: Future[Any] = Future()
        threading.Thread(target=self._settle, args=(future,), name="horovod future").start()
        return future

    def _await(self, seconds: float) -> None:
        begin = time.perf_counter()
        try:
            for name, handle in self._started.items():
                while not self._hvd.poll(handle):
                    if time.perf_counter() - begin > seconds:
                        raise TimeoutError(
                            f"{name} over Horovod has not finished within {seconds:g} s: a rank has not come, or has stopped; "
                            "Horovod's own report names it"
                        )
                    time.sleep(_PAUSE)
        finally:
            if self._started:
                record_wait(*self._of, time.perf_counter() - begin)

    def _settle(self, future: Future[Any]) -> None:
        try:
            self.wait()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(self._result)
