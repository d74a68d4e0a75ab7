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


class NodeWork:
    """`DatasetContext.once_per_node` of this rank. It remembers the values by name."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._values: dict[str, Any] = {}

    def __call__(self, name: str, action: Callable[[], Any]) -> Any:
        """Collective over the world."""
        if name not in self._values:
            self._values[name] = _shared(self._node, action)
        return self._values[name]


def _shared(node: str, action: Callable[[], Any]) -> Any:
    everyone: list[tuple[str, list[int]]] = gather_values((node, sorted(_cores())))
    mine = [rank for rank, (other, _) in enumerate(everyone) if other == node]
    work = None
    if mine[0] == dist.get_rank():
        work = _NodeWork(action, {core for rank in mine for core in everyone[rank][1]})
    pause = _FIRST_PAUSE
    # many short collectives instead of a long one: none may take longer than the communicator's time limit
    while sum_of(int(work is not None and work.goes_on)):
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    assert dist.group.WORLD is not None
    outcome = lowest_error(None if work is None else work.outcome, dist.group.WORLD)
    return gather_values(raised(outcome))[mine[0]]


class _NodeWork:
    """An action on a thread that may use all `cores`. Launchers often bind a rank to its share, but the others wait."""

    def __init__(self, action: Callable[[], Any], cores: set[int]) -> None:
        self._action, self._cores = action, cores
        self.outcome: Outcome[Any] = RuntimeError("the work of this node ended without a result")
        self._thread = threading.Thread(target=self._run, name="node-work", daemon=True)
        self._thread.start()

    @property
    def goes_on(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        if self._cores:
            with suppress(OSError):  # a container may forbid it; then this rank's own cores must do
                os.sched_setaffinity(0, self._cores)  # of this thread, and of the threads that it starts
        self.outcome = attempt(self._action)


def _cores() -> set[int]:
    """The cores that this process may use; none where the system does not say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
