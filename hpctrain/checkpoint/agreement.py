"""Doing something on the ranks of a group so that all of them see the same end: nobody is left waiting."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

import torch
import torch.distributed as dist

from hpctrain.errors import CheckpointError, HpctrainError

T = TypeVar("T")


def survey(group: dist.ProcessGroup, action: Callable[[], T]) -> T | Exception:
    """Run `action` on every rank: its result if it went well on all, else the lowest failing rank's exception."""
    outcome = _attempt(action)
    failed = torch.tensor(int(isinstance(outcome, Exception)))
    dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    if not failed.item():
        return outcome
    errors: list[Exception | None] = [None] * group.size()
    dist.all_gather_object(errors, outcome if isinstance(outcome, Exception) else None, group=group)
    return next(error for error in errors if error is not None)


def together(group: dist.ProcessGroup, action: Callable[[], T]) -> T:
    """Run `action` on every rank; an exception on any is raised on all."""
    outcome = survey(group, action)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def share(group: dist.ProcessGroup, action: Callable[[], T]) -> T:
    """Run `action` on rank 0 only; all ranks return its result or raise its exception."""
    outcomes = [_attempt(action) if group.rank() == 0 else None]
    dist.broadcast_object_list(outcomes, group=group, group_src=0)
    outcome = outcomes[0]
    if isinstance(outcome, Exception):
        raise outcome
    return outcome  # type: ignore[return-value]  # None only before the broadcast, or because T is


def _attempt(action: Callable[[], T]) -> T | Exception:
    try:
        return action()
    except (HpctrainError, OSError, TypeError, MemoryError) as error:
        return error
    except Exception as error:  # it may not be picklable, and all ranks must hear of it
        return RuntimeError(f"{type(error).__name__}: {error}")


def describe_differences(
    group: dist.ProcessGroup, wanted: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]
) -> str | None:
    """How the tensors that the ranks want together differ from those of a file; None when they don't.

    `wanted` is this rank's part; `found` must be equal on all ranks.
    """
    missing = [f"{name} isn't there" for name in wanted if name not in found]
    reshaped = [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    unused = [f"{name} isn't in the model" for name in not_wanted(group, wanted, found)]

    def check() -> None:
        if missing or reshaped:
            raise CheckpointError(_first_few([*missing, *reshaped]))

    outcome = survey(group, check)
    if isinstance(outcome, Exception):
        return str(outcome)
    return _first_few(unused) if unused else None  # all ranks have the same ones


def not_wanted(group: dist.ProcessGroup, wanted: Collection[str], found: Iterable[str]) -> list[str]:
    """Those of `found` that no rank wants; `found` must be equal on all ranks. Only a bit per name travels."""
    names = list(found)
    used = torch.tensor([name in wanted for name in names], dtype=torch.uint8)
    if names:
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    return [name for name, taken in zip(names, used.tolist(), strict=True) if not taken]


def _first_few(sentences: list[str]) -> str:
    more = f" and {len(sentences) - 3} more" if len(sentences) > 3 else ""
    return "; ".join(sentences[:3]) + more
