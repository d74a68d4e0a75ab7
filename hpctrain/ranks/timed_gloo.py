"""Groups of gloo that count the time for which callers wait, by group and operation: gloo itself tells nobody."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from hpctrain.base.accounting import record_wait
from hpctrain.base.store import gloo
from hpctrain.base.torch_private import PythonMessageWork, WrappingGroup, make_group

BACKEND = "timed_gloo"


def timed(backend: str, options: Any) -> tuple[str, Any]:
    """The backend and its options: gloo's with times, any other as it is."""
    return (BACKEND if backend == gloo.BACKEND else backend), options


class TimedWork(PythonMessageWork):
    """The handle of an operation of gloo; a wait for it is counted. The names are torch's."""

    def __init__(self, inner: dist.Work, group: str, operation: str) -> None:
        super().__init__()
        self._inner, self._group, self._operation = inner, group, operation

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        begin = time.perf_counter()
        try:
            return self._inner.wait(timeout)
        finally:
            record_wait(self._group, self._operation, time.perf_counter() - begin)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def is_success(self) -> bool:
        return self._inner.is_success()

    def exception(self) -> Any:
        return self._inner.exception()

    def result(self) -> Any:
        return self._inner.result()

    def source_rank(self) -> int:
        return self._inner.source_rank()

    def get_future(self) -> Future[Any]:
        return self._inner.get_future()


def _timed(method: str, operation: str) -> Any:
    """A method of the inner group. operation: as hpctrain.mpi names it."""

    def call(self: TimedGroup, *args: Any, **kwargs: Any) -> TimedWork:
        return TimedWork(getattr(self.inner, method)(*args, **kwargs), self.group_name, operation)

    return call


class TimedGroup(WrappingGroup):
    """The operations of a group of gloo, each with a TimedWork."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner)
        self._name = inner.group_name

    allreduce = _timed("allreduce", "all_reduce")
    allreduce_coalesced = _timed("allreduce_coalesced", "all_reduce")
    broadcast = _timed("broadcast", "broadcast")
    reduce = _timed("reduce", "reduce")
    all_gather_single = _timed("all_gather_single", "all_gather_into_tensor")
    all_gather_single_coalesced = allgather_into_tensor_coalesced = _timed(
        "allgather_into_tensor_coalesced", "all_gather_into_tensor"
    )
    allgather = _timed("allgather", "all_gather")
    allgather_coalesced = _timed("allgather_coalesced", "all_gather")
    reduce_scatter = _timed("reduce_scatter", "reduce_scatter")
    reduce_scatter_single = _timed("reduce_scatter_single", "reduce_scatter_tensor")
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = _timed(
        "reduce_scatter_tensor_coalesced", "reduce_scatter_tensor"
    )
    gather = _timed("gather", "gather")
    scatter = _timed("scatter", "scatter")
    alltoall = _timed("alltoall", "all_to_all")
    all_to_all_single = alltoall_base = _timed("alltoall_base", "all_to_all_single")
    barrier = _timed("barrier", "barrier")
    send = _timed("send", "send")
    recv = _timed("recv", "recv")
    recv_anysource = _timed("recv_anysource", "recv")

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    @property
    def group_desc(self) -> str:
        return self.inner.group_desc

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        self.inner.monitored_barrier(*args, **kwargs)  # type: ignore[attr-defined]  # torch's stub lacks it

    def shutdown(self) -> None:
        self.inner.shutdown()

    def abort(self) -> None:
        self.inner.abort()


def _create(options: Any, _: Any) -> TimedGroup:
    return TimedGroup(make_group(gloo.BACKEND, options, None))


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
