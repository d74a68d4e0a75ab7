"""torch.distributed's process group over Horovod's operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from hpctrain.api import PythonGroup
from hpctrain_horovod.communicator.work import HorovodWork

_OPERATIONS = {"SUM": "Sum", "AVG": "Average", "MIN": "Min", "MAX": "Max", "PRODUCT": "Product"}
_REDUCED = (torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
"""The dtypes that Horovod adds up; it moves every dtype as bytes."""
_SAME_SIZE = ("allreduce", "reducescatter", "broadcast")
"""Operations whose tensors have one size on all ranks, which may be a part of their name."""
_IN_FLIGHT = 64
"""Operations of one kind and size that may run at once."""


class HorovodGroup(PythonGroup):
    """All of Horovod's ranks, or this rank alone. All ranks call the same operations in the same order.

    Horovod remembers an operation by its name. So names come again: those of one kind, dtype and size take turns.
    """

    def __init__(self, hvd: ModuleType, rank: int, size: int, name: str, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._timeout = timeout.total_seconds()
        self._hvd, self._rank, self._size, self._name = hvd, rank, size, name
        self._turns: dict[str, int] = {}
        self._running: dict[str, HorovodWork] = {}

    # Properties that torch reads.

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "horovod"

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def set_timeout(self, timeout: timedelta) -> None:
        """The time limit, from now on, of each operation."""
        self._timeout = timeout.total_seconds()

    # Reductions.

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> HorovodWork:  # type: ignore[override]
        op = self._operation(opts.reduceOp if opts is not None else ReduceOp.SUM)
        buffers = [self._reducible(tensor, op) for tensor in tensors]
        handles = [
            self._start(f"allreduce.{place}", buffer, partial(self._hvd.allreduce_async_, buffer, op=op))
            for place, buffer in enumerate(buffers)
            if self._size > 1 and buffer.numel()
        ]

        def finish(_: list[Any]) -> None:
            for tensor, buffer in zip(tensors, buffers, strict=True):
                _copy(buffer, tensor)

        return self._work("all_reduce", handles, finish, list(tensors))

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> HorovodWork:
        return self.allreduce(tensors, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> HorovodWork:
        wanted = opts.reduceOp if opts is not None else ReduceOp.SUM
        op = self._operation(wanted)
        if self._size > 1 and op not in (self._hvd.Sum, self._hvd.Average):
            raise ValueError(f"found reduce_scatter with {wanted}, expected SUM or AVG: Horovod has no others")
        if output.numel() * self._size != tensor.numel():
            raise ValueError(
                f"found an input of {tensor.numel()} elements, expected {self._size} times the output's {output.numel()}"
            )
        buffer = self._reducible(tensor, op).view(self._size, -1)
        handles = []
        if self._size > 1 and buffer.numel():
            scatter = partial(self._hvd.reducescatter_async, buffer, op=op)
            handles = [self._start("reducescatter", buffer, scatter)]
        return self._work(
            "reduce_scatter", handles, lambda found: _copy(found[0] if found else buffer, output), [output]
        )

    def reduce_scatter(  # type: ignore[override]
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> HorovodWork:
        flat = torch.cat([tensor.reshape(-1) for tensor in inputs[0]])
        return self.reduce_scatter_single(outputs[0], flat, opts)

    # What moves bytes.

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> HorovodWork:  # type: ignore[override]
        root = opts.rootRank
        buffers = [_bytes(tensor) for tensor in tensors]
        handles = [
            self._start(f"broadcast.{place}", buffer, partial(self._hvd.broadcast_async_, buffer, root))
            for place, buffer in enumerate(buffers)
            if self._size > 1 and buffer.numel()
        ]

        def finish(_: list[Any]) -> None:
            for tensor, buffer in zip(tensors, buffers, strict=True):
                _copy(buffer.view(tensor.dtype), tensor)

        return self._work("broadcast", handles, finish, list(tensors))

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> HorovodWork:
        if output.numel() != self._size * tensor.numel():
            raise ValueError(
                f"found an output of {output.numel()} elements, expected {self._size} times the input's {tensor.numel()}"
            )
        return self._gather(tensor, lambda whole: _copy(whole.view(tensor.dtype), output), [output])

    def allgather(  # type: ignore[override]
        self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: Any = None
    ) -> HorovodWork:
        targets = list(outputs[0])
        return self._gather(tensors[0], lambda whole: _unpack(whole, targets), [targets])

    def gather(  # type: ignore[override]
        self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: Any
    ) -> HorovodWork:
        sent = _bytes(tensors[0])
        splits = [sent.numel() if rank == opts.rootRank else 0 for rank in range(self._size)]
        targets = list(outputs[0]) if self._rank == opts.rootRank else []
        return self._exchange("gather", sent, splits, targets)

    def scatter(  # type: ignore[override]
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> HorovodWork:
        parts = [_bytes(part) for part in inputs[0]] if self._rank == opts.rootRank else []
        sent = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        splits = [part.numel() for part in parts] or [0] * self._size
        return self._exchange("scatter", sent, splits, list(outputs))

    def _exchange(self, kind: str, sent: Tensor, splits: list[int], targets: list[Tensor]) -> HorovodWork:
        """Send `splits[r]` bytes to rank r; what arrives, in the order of the ranks, fills the targets."""

        handles = []
        if self._size > 1:
            exchange = partial(self._hvd.alltoall_async, sent, splits=torch.tensor(splits, dtype=torch.int32))
            handles = [self._start(kind, sent, exchange)]
        return self._work(kind, handles, lambda found: _unpack(found[0][0] if found else sent, targets), targets)

    def barrier(self, opts: Any = None) -> HorovodWork:
        # not Horovod's own, whose wait has no limit
        return self.allreduce([torch.zeros(1)])

    def _gather(self, tensor: Tensor, finish: Callable[[Tensor], None], result: Any) -> HorovodWork:
        sent = _bytes(tensor)
        handles = []
        if self._size > 1:
            handles = [self._start("allgather", sent, partial(self._hvd.allgather_async, sent))]
        return self._work("all_gather", handles, lambda found: finish(found[0] if found else sent), result)

    def _start(self, kind: str, buffer: Tensor, submit: Callable[..., int]) -> tuple[str, int]:
        """The name and the handle of an operation that Horovod has been given."""
        series = f"hpctrain.{self._name}.{kind}.{buffer.dtype}.{buffer.numel() if kind.startswith(_SAME_SIZE) else 0}"
        turn = self._turns[series] = (self._turns.get(series, -1) + 1) % _IN_FLIGHT
        name = f"{series}.{turn}"
        earlier = self._running.get(name)
        if earlier is not None:
            with suppress(Exception):  # told to who waits for it
                earlier.wait()
        return name, submit(name=name)

    def _work(
        self, operation: str, started: Sequence[tuple[str, int]], finish: Callable[[list[Any]], None], result: Any
    ) -> HorovodWork:
        of = self._name, operation
        work = HorovodWork(self._hvd, of, dict(started), finish, result, self._timeout, self._running)
        if not started:
            work.wait()
        return work

    def _reducible(self, tensor: Tensor, op: Any) -> Tensor:
        """The tensor itself if it is contiguous and of a dtype that Horovod reduces as torch does, else a copy that is."""
        if tensor.is_complex():
            return self._reducible(torch.view_as_real(tensor), op)
        averages, dtype = op == self._hvd.Average, tensor.dtype
        if averages and not dtype.is_floating_point:
            raise ValueError(
                f"found an average of {dtype}, expected a floating-point tensor: Horovod would cut the result off"
            )
        if dtype not in _REDUCED or (averages and dtype == torch.float16):  # a sum of float16 may overflow
            dtype = torch.float32 if dtype.is_floating_point else torch.int32
        return tensor.detach().to(dtype).contiguous()

    def _operation(self, op: Any) -> Any:
        for name, horovods in _OPERATIONS.items():
            if op == getattr(ReduceOp, name):
                return getattr(self._hvd, horovods)
        raise ValueError(f"found {op}, expected one of {', '.join(_OPERATIONS)}: Horovod has no others")


def _bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes, (bytes,): its own memory if it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _unpack(whole: Tensor, targets: Sequence[Tensor]) -> None:
    """Fill the targets, one after the other, with bytes."""
    for part, target in zip(whole.split([target.nbytes for target in targets]), targets, strict=True):
        _copy(part.clone().view(target.dtype), target)  # a part may begin anywhere


def _copy(source: Tensor, target: Tensor) -> None:
    if source.data_ptr() == target.data_ptr() and source.numel():
        return
    with torch.no_grad():
        if target.is_complex() and not source.is_complex():
            target = torch.view_as_real(target)
        target.copy_(source.view(target.shape))
