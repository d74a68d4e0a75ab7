"""Work that one rank of each node does for the others."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from hpctrain.ranks.json_collectives import Outcome, attempt, gather_values, lowest_error, raised, sum_of

# seconds between two questions whether the work is done
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.25


def shared_on_node(node: str, action: Callable[[], Any]) -> Any:
    """The value of an action that one rank of each node computes. Collective over the world. node: of this rank."""
    # the cores that this process may use
    own = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    everyone: list[tuple[str, list[int]]] = gather_values((node, own))
    mine = [rank for rank, (other, _) in enumerate(everyone) if other == node]
    cores = {core for rank in mine for core in everyone[rank][1]}
    outcomes: list[Outcome[Any]] = []
    thread = threading.Thread(target=_work, args=(action, cores, outcomes), name="node-work", daemon=True)
    works = mine[0] == dist.get_rank()
    if works:
        thread.start()
    pause = _FIRST_PAUSE
    # many short collectives instead of a long one: none may take longer than the communicator's time limit
    while sum_of(int(thread.is_alive())):
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    assert dist.group.WORLD is not None
    without = RuntimeError("the work of this node ended without a result") if works else None
    outcome = lowest_error(outcomes[0] if outcomes else without, dist.group.WORLD)
    return gather_values(raised(outcome))[mine[0]]


def _work(action: Callable[[], Any], cores: set[int], outcomes: list[Outcome[Any]]) -> None:
    """Append the action's outcome. It may use all `cores`: launchers often bind a rank to its share, but the others wait."""
    if cores:
        with suppress(OSError):  # a container may forbid it; then this rank's own cores must do
            os.sched_setaffinity(0, cores)  # of this thread, and of the threads that it starts
    outcomes.append(attempt(action))
