"""Exchanges small values between ranks as JSON, and outcomes: a value or an exception.

hpctrain.base.json_values says which values are possible.

torch's own all_gather_object and similar functions send pickles, and a pickle runs code where it arrives: a stranger in a
group would control all ranks. JSON runs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base import errors
from hpctrain.base.errors import HpctrainError
from hpctrain.base.json_values import decode, encode
from hpctrain.base.torch_private import DisableTorchDispatch
from hpctrain.mpi.errors import CommunicationError

T = TypeVar("T")
Outcome: TypeAlias = T | Exception

_KNOWN: dict[str, type[Exception]] = {
    **{name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, HpctrainError)},
    "TypeError": TypeError,
    "MemoryError": MemoryError,
    "OSError": OSError,
    "RuntimeError": RuntimeError,
}


@contextmanager
def _of_real_tensors() -> Iterator[None]:
    """Make a collective's messages real tensors, whatever a mode of the caller's makes of its own."""
    with DisableTorchDispatch():
        yield


@_of_real_tensors()
def gather_values(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's `value` in rank order, on all ranks. Collective over `group`, all ranks by default."""
    group = group or world_group()
    if group.size() == 1:
        return [decode(json.loads(_text(value)))]
    content = _padded(_text(value), group)
    received = torch.empty(group.size() * len(content), dtype=torch.uint8)
    dist.all_gather_single(received, content, group=group)
    return [_decode(part) for part in received.chunk(group.size())]


@_of_real_tensors()
def broadcast_value(value: Any = None, group: dist.ProcessGroup | None = None) -> Any:
    """The `value` of the group's rank 0, on all ranks. Collective over `group`, all ranks by default."""
    group = group or world_group()
    content = _padded(_text(value) if group.rank() == 0 else "", group)
    dist.broadcast(content, group=group, group_src=0)
    return _decode(content)


@_of_real_tensors()
def sum_of(value: int, group: dist.ProcessGroup | None = None) -> int:
    """The sum of every rank's `value`, on all ranks. Collective over `group`, all ranks by default."""
    if (group or world_group()).size() == 1:
        return value
    total = torch.tensor(value, dtype=torch.int64)
    dist.all_reduce(total, group=group)
    return int(total)


def world_group() -> dist.ProcessGroup:
    """The group of all ranks of the job."""
    group = dist.group.WORLD
    assert group is not None  # torch.distributed is set up
    return group


def attempt(action: Callable[[], T]) -> Outcome[T]:
    """The result of `action`, or its exception in the form that all ranks will see."""
    try:
        return action()
    except Exception as error:
        if isinstance(error, (HpctrainError, OSError)) or type(error).__name__ in _KNOWN:
            return error
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        plain.__cause__ = error
        return plain


def gather_outcomes(outcome: Outcome[Any], group: dist.ProcessGroup) -> Outcome[list[Any]]:
    """Gather on rank 0 every rank's value in rank order, or the exception of the lowest failing rank; elsewhere []."""
    content = _padded(_text(_pair(outcome)), group)
    received = [torch.empty_like(content) for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather(content, received, group=group, group_dst=0)
    outcomes = [_opened(_decode(row)) for row in received or []]
    return next((error for error in outcomes if isinstance(error, Exception)), outcomes)


def scatter_outcomes(outcome: Outcome[Sequence[Any]], group: dist.ProcessGroup) -> Any:
    """Rank i's item of rank 0's values; rank 0's exception is raised on all. The other ranks' argument isn't used."""
    parts: list[str] = []
    if group.rank() == 0:
        each = [outcome] * group.size() if isinstance(outcome, Exception) else outcome
        parts = [_text(_pair(part)) for part in each]
    most = torch.tensor(max((len(part) for part in parts), default=0))
    dist.broadcast(most, group=group, group_src=0)
    mine = torch.empty(int(most), dtype=torch.uint8)
    dist.scatter(mine, [_as_tensor(part, int(most)) for part in parts] or None, group=group, group_src=0)
    return raised(_opened(_decode(mine)))


def agree(outcome: Outcome[Any], group: dist.ProcessGroup) -> Any:
    """Rank 0's value on all ranks, or its exception raised on all. The other ranks' argument isn't used."""
    return raised(_opened(broadcast_value(_pair(outcome) if group.rank() == 0 else None, group)))


def lowest_error(outcome: Outcome[T], group: dist.ProcessGroup) -> Outcome[T]:
    """This rank's own outcome if all ranks have a value, else the lowest failing rank's exception."""
    failures = gather_values(_fields(outcome) if isinstance(outcome, Exception) else None, group)
    rank = next((rank for rank, fields in enumerate(failures) if fields is not None), group.rank())
    return outcome if rank == group.rank() else _error(failures[rank])


def survey(group: dist.ProcessGroup, action: Callable[[], T]) -> Outcome[T]:
    """Run `action` on every rank: its result if it succeeded on all, else the lowest failing rank's exception.

    If it failed here before a collective that the other ranks have entered, agreement is impossible: then the result is
    this rank's own exception.
    """
    outcome = attempt(action)
    if isinstance(outcome, Exception) and isinstance(outcome.__cause__, CommunicationError):
        raise outcome.__cause__  # a collective in `action` failed, so agreeing with the same ranks would fail, too
    try:
        return lowest_error(outcome, group)
    except Exception:
        if isinstance(outcome, Exception):
            return outcome
        raise


def together(group: dist.ProcessGroup, action: Callable[[], T]) -> T:
    """Run `action` on every rank; an exception on any rank is raised on all."""
    return raised(survey(group, action))


def share(group: dist.ProcessGroup, action: Callable[[], T]) -> T:
    """Run `action` on rank 0 only; all ranks return its value, which must be a small one, or raise its exception."""
    result: T = agree(attempt(action) if group.rank() == 0 else None, group)
    return result


def raised(outcome: Outcome[T]) -> T:
    """The value; raises an exception."""
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _padded(text: str, group: dist.ProcessGroup) -> Tensor:
    """`text` as bytes, padded to the longest on any rank."""
    longest = torch.tensor(len(text))
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    return _as_tensor(text, int(longest))


def _as_tensor(text: str, length: int) -> Tensor:
    """`text` padded with blanks, which JSON allows at its end. json.dumps gives ASCII, so a character is a byte."""
    return torch.frombuffer(bytearray(text.ljust(length or 1).encode("ascii")), dtype=torch.uint8)[:length]


def _text(value: Any) -> str:
    return json.dumps(encode(value))


def _decode(content: Tensor) -> Any:
    return decode(json.loads(bytes(content.numpy())))


def _pair(outcome: Outcome[Any]) -> list[Any]:
    """The fields of an exception, and a value: one of the two is None."""
    return [_fields(outcome), None] if isinstance(outcome, Exception) else [None, outcome]


def _opened(content: list[Any]) -> Outcome[Any]:
    fields, value = content
    return value if fields is None else _error(fields)


def _fields(error: Exception) -> dict[str, Any]:
    fields: dict[str, Any] = {"kind": type(error).__name__, "message": str(error)}
    if isinstance(error, HpctrainError):
        fields["exit_code"] = error.exit_code
    elif isinstance(error, OSError):
        fields["kind"] = "OSError"  # its number restores the right subclass
        if error.errno is not None:
            file = None if error.filename is None else str(error.filename)
            fields |= {"errno": error.errno, "strerror": error.strerror, "filename": file}
    return fields


def _error(fields: dict[str, Any]) -> Exception:
    if "errno" in fields:
        error: Any = OSError(fields["errno"], fields["strerror"], fields["filename"])
    else:
        error = _KNOWN.get(fields["kind"], HpctrainError)(fields["message"])
        if "exit_code" in fields:
            error.exit_code = fields["exit_code"]
    error.is_of_another_rank = True  # that rank knows more and prints it
    raised_there: Exception = error
    return raised_there
