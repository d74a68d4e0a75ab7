"""What the ranks of a group tell each other while one checkpoint is written: always through rank 0 of the group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import torch.distributed as dist

from hpctrain.api import CheckpointError

T = TypeVar("T")
Outcome: TypeAlias = T | Exception


def attempt(action: Callable[[], T]) -> Outcome[T]:
    """The result of `action`, or the exception that it raised, in a form that can be sent to other ranks."""
    try:
        return action()
    except (CheckpointError, OSError, TypeError, MemoryError) as error:
        return error
    except Exception as error:  # it may not be picklable, and all ranks must hear of it
        return CheckpointError(f"{type(error).__name__}: {error}")


def gather(outcome: Outcome[T], group: dist.ProcessGroup) -> Outcome[list[T]]:
    """On rank 0 everyone's result in rank order, or the exception of the lowest rank that has one; elsewhere []."""
    outcomes: list[Outcome[T]] | None = [outcome] * group.size() if group.rank() == 0 else None
    dist.gather_object(outcome, outcomes, group=group, group_dst=0)
    results: list[T] = []
    for one in outcomes or []:
        if isinstance(one, Exception):
            return one
        results.append(one)
    return results


def scatter(outcome: Outcome[list[T]], group: dist.ProcessGroup) -> T:
    """Rank i's item of rank 0's list; rank 0's exception is raised on all. The other ranks' argument isn't used."""
    parts: list[Outcome[T]] | None = None
    if group.rank() == 0:
        parts = [outcome] * group.size() if isinstance(outcome, Exception) else list(outcome)
    received: list[Outcome[T] | None] = [None]
    dist.scatter_object_list(received, parts, group=group, group_src=0)
    mine = received[0]
    if isinstance(mine, Exception):
        raise mine
    return mine  # type: ignore[return-value]  # None only before the scatter


def agree(outcome: Outcome[None], group: dist.ProcessGroup) -> None:
    """Raise rank 0's exception on all, if it has one."""
    outcomes = [outcome]
    dist.broadcast_object_list(outcomes, group=group, group_src=0)
    if isinstance(outcomes[0], Exception):
        raise outcomes[0]
