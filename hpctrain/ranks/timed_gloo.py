"""Groups of gloo that count callers' waits by group and operation. A call-back runs on threads that outlive the interpreter."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hpctrain.base.accounting import record_wait
from hpctrain.base.store import gloo
from hpctrain.base.torch_groups import TransparentGroup, WrappingWork

BACKEND = "timed_gloo"


def timed(backend: str) -> str:
    """gloo's backend with times, any other as it is."""
    torch_dist: Any = dist  # whose types lack these names
    is_compared = torch_dist.get_debug_level() == torch_dist.DebugLevel.DETAIL  # in groups that are not made in Python
    return BACKEND if backend == gloo.BACKEND and not is_compared else backend


class TimedWork(WrappingWork):
    """The handle of an operation of gloo; a wait for it is counted."""

    def __init__(self, inner: Any, group: str, operation: str) -> None:
        super().__init__(inner)
        self._group, self._operation = group, operation

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        begin = time.perf_counter()
        try:
            done: bool = self.inner.wait(timeout)
            return done
        finally:
            record_wait(self._group, self._operation, time.perf_counter() - begin)


def _timed(method: str, operation: str) -> Any:
    """A method of the inner group. operation: as hpctrain.mpi names it."""

    def call(self: TimedGroup, *args: Any, **kwargs: Any) -> TimedWork:
        return TimedWork(getattr(self.inner, method)(*args, **kwargs), self.group_name, operation)

    return call


class TimedGroup(TransparentGroup):
    """The operations of a group of gloo, each with a TimedWork. What torch's C++ code asks of it by itself, gloo does."""

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


def _create(options: Any, _: Any) -> TimedGroup:
    return TimedGroup(gloo.create_group(options), options)


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
