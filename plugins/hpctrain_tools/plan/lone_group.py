"""A process group of which only this rank exists: it counts what would be communicated, and gives every rank's part as this one's.

So one process goes through a step of a thousand ranks. Its numbers mean nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Work
from torch.futures import Future

from hpctrain.base.torch_groups import HashStore, PythonGroup
from hpctrain.base.torch_private import is_fake
from hpctrain.contracts.model import tensors_in
from hpctrain_tools.plan.torch_fake import resolve_group, without_modes

BACKEND = "lone"


class Kind(NamedTuple):
    """A kind of operation: its name in torch, the name of the group, and the group's ranks among all."""

    operation: str
    group: str
    members: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.members)


class Traffic:
    """The number of operations of each kind so far, and the bytes of their inputs on this rank."""

    def __init__(self) -> None:
        self.calls: Counter[Kind] = Counter()
        self.nbytes: Counter[Kind] = Counter()

    def clear(self) -> None:
        """Begin anew."""
        self.calls.clear()
        self.nbytes.clear()


TRAFFIC = Traffic()
"""The traffic of this process."""


@contextmanager
def lone_rank(rank: int, size: int, kind: str = "cpu") -> Iterator[None]:
    """Set torch.distributed up for one rank of `size`, of which the others do not exist. kind: of its device."""

    def create(options: Any, _: Any) -> LoneGroup:
        return LoneGroup(options)

    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=sorted({"cpu", kind}))
    dist.init_process_group(BACKEND, rank=rank, world_size=size, store=HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        TRAFFIC.clear()


class _Done(Work):
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


class LoneGroup(PythonGroup):
    """The group. Its operations are added below."""

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._name = options.group_id
        self._members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return str(self._name)

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return BACKEND

    def barrier(self, *_: Any, **__: Any) -> Work:
        return _Done([])

    def note(self, operation: str, inputs: Any) -> None:
        """Count an operation."""
        kind = Kind(operation, self.group_name, self._members)
        TRAFFIC.calls[kind] += 1
        TRAFFIC.nbytes[kind] += sum(one.nbytes for one in tensors_in(inputs))


def note_functional(name: str, inputs: list[Tensor], group: Any) -> None:
    """Count a functional collective of fake tensors, which reaches no group. group: it, or its name."""
    operation = max((one for one in _METHODS if name.startswith(one)), key=len)
    found = group if isinstance(group, dist.ProcessGroup) else resolve_group(group)
    assert isinstance(found, LoneGroup)  # there is no other one in a plan
    found.note(operation, inputs)


def _fill(output: Any, given: Any) -> None:
    """Each rank's part of the output is this rank's input; where it is smaller, the beginning of it."""
    for target, source in zip(tensors_in(output), _repeated(given), strict=False):
        if is_fake(target):
            continue
        with without_modes(), torch.no_grad():
            values, wanted = source.detach().reshape(-1), target.numel()
            target.copy_(values.repeat(-(-wanted // max(1, len(values))))[:wanted].view_as(target))


def _repeated(value: Any) -> Iterator[Tensor]:
    """The tensors, the last one again and again."""
    one = None
    for one in tensors_in(value):
        yield one
    while one is not None:
        yield one


def _in_place(name: str) -> Any:
    def run(self: LoneGroup, tensors: Any, *options: Any, **__: Any) -> Work:
        self.note(name, tensors)
        if name == "all_reduce" and options and options[0].reduceOp == dist.ReduceOp.SUM:
            for one in tensors_in(tensors):
                if one.numel() == 1 and not is_fake(one):  # as if each rank had this one's
                    one.data.mul_(self.size())
        return _Done(tensors)

    return run


def _apart(name: str) -> Any:
    def run(self: LoneGroup, outputs: Any, inputs: Any, *_: Any, **__: Any) -> Work:
        self.note(name, inputs)
        _fill(outputs, inputs)
        return _Done(outputs)

    return run


def _message(name: str) -> Any:
    def run(self: LoneGroup, tensors: Any, *_: Any, **__: Any) -> Work:
        self.note(name, tensors)
        if name == "recv":
            for tensor in tensors_in(tensors):
                if not is_fake(tensor):
                    tensor.data.zero_()
        return _Done(tensors)

    return run


# torch's methods of a group by the operation that they are
_METHODS = {
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
for _operation, (_make, _names) in _METHODS.items():
    for _name in _names:
        setattr(LoneGroup, _name, _make(_operation))
