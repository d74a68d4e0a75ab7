"""A process group over MPI that behaves like one of an accelerator where a program could go wrong: its results come late.

It takes tensors of the CPU and of accelerators. An asynchronous operation works on copies in the host's memory. Until somebody
waits for it, its outputs are NaN; then it fails if a tensor that it reads or writes has changed since. So a missing wait, and a
buffer that is used again too early, are found on every machine, where a CPU's operations are mostly done before anybody could
notice. As NCCL's do, synchronous operations return no handle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Work
from torch.futures import Future

from hpctrain.contracts.model import tensors_in
from hpctrain.mpi.process_group.engine import settle
from hpctrain.mpi.process_group.group import MPIProcessGroup
from hpctrain.mpi.transfer.buffers import overlap

IN_PLACE = ("allreduce", "allreduce_coalesced", "broadcast", "reduce")
APART = (
    "all_gather_single", "all_gather_single_coalesced", "allgather_into_tensor_coalesced", "allgather",
    "allgather_coalesced", "gather", "scatter", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "all_to_all_single", "alltoall_base", "alltoall",
)  # fmt: skip
MESSAGES = {"send": "input", "recv": "output", "recv_anysource": "output"}


class LateError(AssertionError):
    """A tensor of an operation was used before its wait."""


class WrappingWork(Work):
    """The handle of an operation of another group, `inner`, with something before or after its wait."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        done: bool = self.inner.wait(timeout)
        return done

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        done: bool = self.inner.is_completed()
        return done

    def is_success(self) -> bool:
        good: bool = self.inner.is_success()
        return good

    def exception(self) -> Any:
        return self.inner.exception()

    def result(self) -> Any:
        return self.inner.result()

    def _source_rank(self) -> int:
        """torch.distributed.recv calls this after a receive from any rank."""
        rank: int = self.inner._source_rank()
        return rank

    def get_future(self) -> Any:
        return self.inner.get_future()


class LateWork(WrappingWork):
    """The handle of an operation on copies; `land` checks the originals, and gives the outputs their values."""

    def __init__(self, inner: Work, result: Any, land: Callable[[], None]) -> None:
        super().__init__(inner)
        self._result, self._land = result, land
        self._lock, self._landed = threading.Lock(), False
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        super().wait(timeout)
        with self._lock:
            landed, self._landed = self._landed, True
            if not landed:
                self._land()
        return True

    def is_completed(self) -> bool:
        return super().is_completed() and self.wait()

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Future[Any]:
        if self._future is None:
            made: Future[Any] = Future()
            super().get_future().add_done_callback(lambda _: settle(made, self.wait, self.result))
            self._future = made
        return self._future


class LateGroup(MPIProcessGroup):
    """The process group over MPI, with results that come late."""

    def _get_backend(self, device: torch.device) -> Any:
        return self

    here = threading.local()
    """`inside` on a thread: whether one of its operations calls another."""


def copied(value: Any) -> Any:
    """The same structure of copies on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.is_cpu else value.detach().cpu()
    return [copied(one) for one in value]


def spoil(tensor: Tensor) -> None:
    """Fill a tensor with NaN, or with the largest number of its kind."""
    kind = tensor.dtype
    number = torch.nan if kind.is_floating_point or kind.is_complex else kind == torch.bool or torch.iinfo(kind).max
    tensor.data.fill_(number)


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def late(name: str, outputs: Any, inputs: Any, start: Callable[[Any, Any], Work], spoiled: bool = True) -> LateWork:
    """Start an operation on copies of its tensors; `spoiled`: whether it writes the outputs on this rank."""
    kept_inputs, kept_outputs = copied(inputs), copied(outputs)
    inner = start(kept_outputs, kept_inputs)
    written = list(tensors_in(outputs))
    # an all-gather may read its input from the place of this rank in its output
    read = [one for one in tensors_in(inputs) if not any(overlap(one, other) for other in written)]
    for tensor in written if spoiled else ():
        spoil(tensor)
    before = [bits(tensor).clone() for tensor in (*written, *read)]

    def land() -> None:
        for tensor, content in zip((*written, *read), before, strict=True):
            if not torch.equal(bits(tensor), content):
                raise LateError(f"a tensor {tuple(tensor.shape)} of {name} has changed before its wait")
        for tensor, copy in zip(written, tensors_in(kept_outputs), strict=True):
            tensor.data.copy_(copy)

    return LateWork(inner, outputs, land)


def _wrapped(name: str, kind: str) -> Callable[..., Any]:
    original = getattr(MPIProcessGroup, name)

    def run(self: LateGroup, first: Any, *rest: Any, **named: Any) -> Any:
        if getattr(self.here, "inside", False) or any(one.layout != torch.strided for one in tensors_in(first)):
            return original(self, first, *rest, **named)
        self.here.inside = True
        try:
            opts = named.get("opts") or next((one for one in rest if hasattr(one, "asyncOp")), None)
            waits = opts is not None and not opts.asyncOp
            if waits and all(one.is_cpu for one in tensors_in(first)):
                original(self, first, *rest, **named).wait()
                return None
            if kind == "apart":
                second, *more = rest
                work = late(name, first, second, lambda out, given: original(self, out, given, *more, **named))
            elif kind == "input":
                work = late(name, [], first, lambda _, given: original(self, given, *rest, **named))
            else:
                elsewhere = name in ("broadcast", "reduce") and (opts.rootRank == self.rank()) == (name == "broadcast")
                work = late(name, first, [], lambda out, _: original(self, out, *rest, **named), spoiled=not elsewhere)
            return None if waits and work.wait() else work
        finally:
            self.here.inside = False

    return run


for _name in (*IN_PLACE, *APART, *MESSAGES):
    _kind = "in place" if _name in IN_PLACE else "apart" if _name in APART else MESSAGES[_name]
    setattr(LateGroup, _name, _wrapped(_name, _kind))
