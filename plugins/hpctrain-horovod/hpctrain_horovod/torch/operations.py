"""The asynchronous operations: each checks its arguments, submits, and returns a handle for `synchronize`.

All raise ValueError for what this rank passes wrongly, but for reducescatter's op, which is a HorovodInternalError as in the
original. What differs between ranks is a HorovodInternalError of `synchronize`, on every rank; the next operation works again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hpctrain_horovod.common.process_sets import ProcessSet, global_process_set
from hpctrain_horovod.engine import request as kinds
from hpctrain_horovod.engine import runtime
from hpctrain_horovod.engine.errors import HorovodInternalError
from hpctrain_horovod.engine.request import Request
from hpctrain_horovod.engine.submission import Submission

if TYPE_CHECKING:
    from hpctrain_horovod.engine.team import Team

Average, Sum, Adasum, Min, Max, Product = range(6)
_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
_REDUCED = (torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MOVED = (torch.uint8, torch.int8, torch.int16, *_REDUCED)


def operation_of(op: int | None, average: bool | None) -> int:
    """The reduction that a caller asks for, by the argument `op` or the older `average`."""
    if op is not None and average is not None:
        raise ValueError("found both op and average; pass op only")
    if average is not None:
        return Average if average else Sum
    if op is None:
        return Average
    if op not in range(len(_NAMES)):
        raise ValueError(f"found op={op!r}, expected one of hvd.{', hvd.'.join(_NAMES)}")
    return op


class Scales(NamedTuple):
    """The factors of a reduction, before and after it."""

    prescale: float
    postscale: float


_NO_SCALES = Scales(1.0, 1.0)


def reduce_async(
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    name: str | None,
    op: int,
    scales: Scales,
    process_set: ProcessSet,
    finish: Callable[[list[Any]], Any],
    *,
    grouped: bool = False,
    waits: bool = False,
) -> int:
    """Reduce each tensor into its output."""
    team = _team(process_set)
    requests = []
    for tensor, own_name in zip(
        tensors, _names(len(tensors), name, "grouped_allreduce" if grouped else None), strict=True
    ):
        _check(tensor, _REDUCED, "an allreduce")
        _check_adasum(tensor, op, team)
        requests.append(_request(kinds.ALLREDUCE, own_name, tensor, tensor.shape, _NAMES[op], scales))

    def make(count: int) -> list[Submission]:
        number = count if name is None else -1
        return [
            _reduction(request, number, tensor, output)
            for request, tensor, output in zip(requests, tensors, outputs, strict=True)
        ]

    return runtime.working().submit(team, make, finish, waits=waits)


def gather_async(
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    finish: Callable[[list[Any]], Any],
    *,
    grouped: bool = False,
    waits: bool = False,
) -> int:
    """Concatenate the ranks' tensors along the first dim, in which they may differ."""
    team = _team(process_set)
    requests = []
    for tensor, own_name in zip(
        tensors, _names(len(tensors), name, "grouped_allgather" if grouped else None), strict=True
    ):
        _check(tensor, _MOVED, "an allgather")
        if tensor.dim() == 0:
            raise IndexError(
                "found an allgather of a tensor without dims, expected at least one; pass tensor.reshape(1)"
            )
        requests.append(_request(kinds.ALLGATHER, own_name, tensor, tensor.shape[1:]))

    def make(count: int) -> list[Submission]:
        number = count if name is None else -1
        return [
            Submission(request, number, tensor.detach(), value=tensor.shape[0])
            for request, tensor in zip(requests, tensors, strict=True)
        ]

    return runtime.working().submit(team, make, finish, waits=waits)


def broadcast_into_async(
    tensor: Tensor, output: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, *, waits: bool = False
) -> int:
    """Copy the root's tensor into `output` on all ranks; the result is `output`."""
    team = _team(process_set)
    _check(tensor, _MOVED, "a broadcast")
    if root_rank not in team.ranks:
        raise ValueError(f"found root_rank={root_rank}, expected one of the ranks {team.ranks}")
    request = _request(kinds.BROADCAST, name or "", tensor, tensor.shape, root=team.ranks.index(root_rank))

    def make(count: int) -> list[Submission]:
        return [Submission(request, count if name is None else -1, tensor.detach(), output.detach())]

    return runtime.working().submit(team, make, lambda _: output, waits=waits)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    waits: bool = False,
) -> int:
    """Send `splits[r]` rows to rank r (None: equally many); the result is (what was received, the rows of each rank)."""
    team = _team(process_set)
    _check(tensor, _MOVED, "an alltoall")
    counts = _checked_splits(tensor, splits, team.size)
    request = _request(kinds.ALLTOALL, name or "", tensor, tensor.shape[1:])

    def make(count: int) -> list[Submission]:
        return [Submission(request, count if name is None else -1, tensor.detach(), splits=counts)]

    return runtime.working().submit(team, make, waits=waits)


def scatter_async(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    scales: Scales,
    process_set: ProcessSet,
    finish: Callable[[list[Any]], Any],
    *,
    grouped: bool = False,
    waits: bool = False,
) -> int:
    """Reduce the tensors and scatter the rows of the results over the ranks."""
    team = _team(process_set)
    if op not in (Average, Sum):
        raise HorovodInternalError(f"found a reducescatter with op={_NAMES[op]}, expected hvd.Average or hvd.Sum")
    requests = []
    names = _names(len(tensors), name, "grouped_reducescatter" if grouped else None)
    for tensor, own_name in zip(tensors, names, strict=True):
        _check(tensor, _REDUCED, "a reducescatter")
        if tensor.dim() == 0:
            raise ValueError("found a reducescatter of a tensor without dims, expected rows to scatter")
        requests.append(_request(kinds.REDUCESCATTER, own_name, tensor, tensor.shape, _NAMES[op], scales))

    def make(count: int) -> list[Submission]:
        number = count if name is None else -1
        return [Submission(request, number, tensor.detach()) for request, tensor in zip(requests, tensors, strict=True)]

    return runtime.working().submit(team, make, finish, waits=waits)


def poll(handle: int) -> bool:
    """Whether the operation has finished. Raises ValueError for an unknown handle."""
    return runtime.known().poll(handle)


def synchronize(handle: int) -> Any:
    """Wait for the operation and return its result; None if it was synchronized before.

    Raises HorovodInternalError if the operation failed on any rank.
    """
    return runtime.working().synchronize(handle)


def join(device: int = -1) -> int:
    """Tell that this rank has no more data; until all ranks join, it contributes zeros to their allreduces.

    device: without effect. Returns the last rank to join.
    """
    return runtime.working().join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the set is here."""
    request = Request(kinds.BARRIER, name="barrier")
    active = runtime.working()
    active.synchronize(active.submit(_team(process_set), lambda _: [Submission(request, -1)], waits=True))


def _team(process_set: ProcessSet) -> Team:
    active = runtime.working()
    if process_set.process_set_id is None:
        raise ValueError("found a process set that is not registered; pass it to hvd.init or hvd.add_process_set first")
    return active.team(process_set.process_set_id)


def _check(tensor: Tensor, dtypes: Sequence[torch.dtype], what: str) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"found {what} of {type(tensor).__name__}, expected a tensor")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ValueError(f"found {what} of a tensor that is not contiguous; pass tensor.contiguous()")
    if tensor.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"found {what} of {tensor.dtype}, expected one of {names}")


def _check_adasum(tensor: Tensor, op: int, team: Team) -> None:
    if op != Adasum:
        return
    if not tensor.is_floating_point():
        raise ValueError(f"found Adasum of {tensor.dtype}, expected a floating-point tensor")
    if team.size & (team.size - 1):
        raise NotImplementedError(f"found Adasum on {team.size} ranks, expected a power of two")


def _request(
    kind: str, name: str, tensor: Tensor, shape: Sequence[int], op: str = "", scales: Scales = _NO_SCALES, root: int = -1
) -> Request:  # fmt: skip
    before, after = map(float, scales)  # a tensor may change, and would be kept alive
    return _cached_request(kind, name, tensor.dtype, shape, op, before, after, root, tensor.device.type)


@lru_cache(maxsize=8192)
def _cached_request(
    kind: str, name: str, dtype: torch.dtype, shape: Sequence[int], op: str, before: float, after: float, root: int, device: str
) -> Request:  # fmt: skip
    """A training step asks for the same again and again; an object that was seen before is also compared at once."""
    dtype_name = str(dtype).removeprefix("torch.")
    return Request(kind, name, dtype_name, tuple(shape), op, before, after, root, device)


def _names(count: int, name: str | None, group: str | None) -> list[str]:
    """The name of one operation, or numbered ones in a group."""
    if group is None:
        return [name or ""]
    if not count:
        raise ValueError(f"found a {group} of no tensors, expected at least one")
    base = group if name is None else f"{group}.{name}"
    return [f"{base}_{place}of{count}" for place in range(1, count + 1)]


def _reduction(request: Request, number: int, tensor: Tensor, output: Tensor) -> Submission:
    given = tensor.detach()
    return Submission(request, number, given, given if output is tensor else output.detach())


def _checked_splits(tensor: Tensor, splits: Tensor | Sequence[int] | None, size: int) -> list[int]:
    if tensor.dim() == 0:
        raise ValueError("found an alltoall of a tensor without dims, expected rows to send")
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(f"found an alltoall of {rows} rows, expected a multiple of {size} ranks; or pass splits")
        return [rows // size] * size
    if isinstance(splits, Tensor) and splits.dtype != torch.int32:
        raise ValueError(f"found splits of {splits.dtype}, expected torch.int32")
    counts = [int(count) for count in (splits.tolist() if isinstance(splits, Tensor) else splits)]
    if len(counts) != size or sum(counts) != rows or min(counts) < 0:
        raise ValueError(
            f"found splits {counts}, expected {size} numbers, one for each rank, that add up to {rows} rows"
        )
    return counts
