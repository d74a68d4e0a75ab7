"""A process group of which only this rank exists: it counts what would be communicated, and gives every rank's part as this one's.

So one process shows what a step of a thousand ranks communicates. Its numbers mean nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from late_group import flat
from torch import Tensor
from torch.distributed.distributed_c10d import Work
from torch.futures import Future

from hpctrain.base.torch_private import PythonGroup

BACKEND = "counting"


class Kind(NamedTuple):
    """A kind of operation, by its torch name and the number of ranks."""

    operation: str
    ranks: int


calls: Counter[Kind] = Counter()
nbytes: Counter[Kind] = Counter()
"""Bytes of the inputs on this rank."""


class Done(Work):
    """The handle of an operation that is done."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._made: Future[Any] = Future()
        self._made.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> Any:
        return self._made.value()

    def get_future(self) -> Future[Any]:
        return self._made


class CountingGroup(PythonGroup):
    """A group of which the other ranks do not exist."""

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._name = options.group_id

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return str(self._name)

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return BACKEND

    def _note(self, name: str, inputs: Any) -> None:
        kind = Kind(name, self.size())
        calls[kind] += 1
        nbytes[kind] += sum(one.nbytes for one in flat(inputs))


def _fill(output: Any, given: Any) -> None:
    """Each rank's part of the output is this rank's input; where it is smaller, the beginning of it."""
    for target, source in zip(flat(output), _repeated(given), strict=False):
        values = source.detach().reshape(-1)
        with torch.no_grad():
            wanted = target.numel()
            target.copy_(values.repeat(-(-wanted // max(1, len(values))))[:wanted].view_as(target))


def _repeated(value: Any) -> Iterator[Tensor]:
    """The tensors, the last one again and again."""
    one = None
    for one in flat(value):
        yield one
    while one is not None:
        yield one


def _in_place(name: str) -> Any:
    def run(self: CountingGroup, tensors: Any, *options: Any, **__: Any) -> Work:
        self._note(name, tensors)
        if name == "all_reduce" and options and options[0].reduceOp == dist.ReduceOp.SUM:
            for one in flat(tensors):
                if one.numel() == 1:  # as if each rank had this one's
                    one.data.mul_(self.size())
        return Done(tensors)

    return run


def _apart(name: str) -> Any:
    def run(self: CountingGroup, outputs: Any, inputs: Any, *_: Any, **__: Any) -> Work:
        self._note(name, inputs)
        _fill(outputs, inputs)
        return Done(outputs)

    return run


def _message(name: str) -> Any:
    def run(self: CountingGroup, tensors: Any, *_: Any, **__: Any) -> Work:
        self._note(name, tensors)
        if name == "recv":
            for tensor in flat(tensors):
                tensor.data.zero_()
        return Done(tensors)

    return run


NAMES = {
    "all_reduce": (_in_place, ("allreduce", "allreduce_coalesced")),
    "broadcast": (_in_place, ("broadcast",)),
    "reduce": (_in_place, ("reduce",)),
    "all_gather": (
        _apart,
        (
            "all_gather_single",
            "all_gather_single_coalesced",
            "allgather_into_tensor_coalesced",
            "allgather",
            "allgather_coalesced",
        ),
    ),
    "reduce_scatter": (
        _apart,
        (
            "reduce_scatter",
            "reduce_scatter_single",
            "reduce_scatter_single_coalesced",
            "reduce_scatter_tensor_coalesced",
        ),
    ),
    "all_to_all": (_apart, ("all_to_all_single", "alltoall_base", "alltoall")),
    "gather": (_apart, ("gather",)),
    "scatter": (_apart, ("scatter",)),
    "send": (_message, ("send",)),
    "recv": (_message, ("recv", "recv_anysource")),
}
for _operation, (_make, _methods) in NAMES.items():
    for _method in _methods:
        setattr(CountingGroup, _method, _make(_operation))
CountingGroup.barrier = lambda *_, **__: Done([])  # type: ignore[attr-defined]


def register() -> None:
    """Make the backend known to torch."""

    def create(options: Any, _: Any) -> CountingGroup:
        return CountingGroup(options)

    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
