"""This rank's communication in a step by axis of the mesh and kind of operation, as the groups on CPUs tell it."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from hpctrain.base.accounting import OperationStatistics, statistics
from hpctrain.training.metrics import OwnRow

_WORLD, _OTHER = "world", "other"
"""The names of the group of all ranks, over which they exchange figures, and of groups of no axis, unless an axis has them."""


class Traffic:
    """Takes what was added since the last call of `take`. Only hpctrain.mpi knows what an operation took that nobody waited for;
    torch's backends for accelerators tell nothing."""

    def __init__(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        """groups: by the names of their axes."""
        world = dist.group.WORLD
        self._names: dict[str, str] = {} if world is None else {world.group_name: _WORLD}
        self._names |= {group.group_name: axis for axis, group in groups.items()}
        self._axes = frozenset(groups)
        self._before = dict[tuple[str, str], OperationStatistics]()
        self.take()

    def take(self) -> OwnRow:
        """The tables of a row, each by "AXIS.OPERATION"; none without operations."""
        now = {(group, name): one for group, found in statistics().groups.items() for name, one in found.items()}
        exposed, hidden, speeds = dict[str, float](), dict[str, float](), dict[str, float]()
        for (group, name), one in now.items():
            before = self._before.get((group, name), OperationStatistics())
            calls, seconds = one.calls - before.calls, one.seconds - before.seconds
            blocked = one.blocked_seconds - before.blocked_seconds
            if calls == 0 and blocked == 0:
                continue
            place = self._names.get(group, _OTHER)
            key = f"{place}.{name}"
            exposed[key] = exposed.get(key, 0.0) + blocked
            if seconds > blocked:
                hidden[key] = hidden.get(key, 0.0) + seconds - blocked
            if seconds > 0 and place in self._axes:
                speeds[key] = (one.bytes - before.bytes) / seconds
        self._before = now
        found = OwnRow()
        if exposed:
            found["exposed_seconds"] = exposed
        if hidden:
            found["hidden_seconds"] = hidden
        if speeds:
            found["bytes_per_second"] = speeds
        return found
