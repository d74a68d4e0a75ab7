"""The cost of communication in this process: seconds that callers were blocked, and bytes per group and kind of operation.

Counters are cumulative; take two snapshots and subtract. They are process-wide, but for `waited`, which is a thread's own.
Imports nothing else of hpctrain.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class OperationStatistics:
    """Totals of one kind of operation.

    calls: number of operations. bytes: this rank's input (a receive counts its output). seconds: running time of the
    operations, whether or not a caller waited for them. blocked_seconds: time that callers waited for them.
    """

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0
    blocked_seconds: float = 0.0


@dataclass(frozen=True)
class Statistics:
    """A snapshot, by `ProcessGroup.group_name`, then by the name of the operation."""

    groups: dict[str, dict[str, OperationStatistics]]

    @property
    def operations(self) -> dict[str, OperationStatistics]:
        """The totals of all groups, by the name of the operation."""
        names = dict.fromkeys(name for operations in self.groups.values() for name in operations)
        return {name: _sum(of[name] for of in self.groups.values() if name in of) for name in names}

    @property
    def total(self) -> OperationStatistics:
        """The total of all operations. Their `seconds` include those that overlap with computation."""
        return _sum(operation for operations in self.groups.values() for operation in operations.values())


def _sum(parts: Iterable[OperationStatistics]) -> OperationStatistics:
    return OperationStatistics(*map(sum, zip(*map(astuple, parts), strict=True)))


_waits = threading.local()
_lock = threading.Lock()
_totals: dict[tuple[str, str], list[float]] = {}  # calls, bytes, seconds and blocked seconds by group and operation


def waited() -> float:
    """The seconds that this thread has waited so far."""
    seconds: float = getattr(_waits, "seconds", 0.0)
    return seconds


def record(group: str, name: str, nbytes: int, seconds: float) -> None:
    """Count one finished operation."""
    with _lock:
        total = _totals.setdefault((group, name), [0, 0, 0.0, 0.0])
        total[0] += 1
        total[1] += nbytes
        total[2] += seconds


def record_wait(group: str, operation: str, seconds: float) -> None:
    """Count the time that this thread has waited for an operation of the group of this name, as torch calls both.

    It is communication then, not computing, in the step's row. A communicator whose operations end on the CPU calls it.
    """
    _waits.seconds = waited() + seconds
    with _lock:
        _totals.setdefault((group, operation), [0, 0, 0.0, 0.0])[3] += seconds


def statistics() -> Statistics:
    """The totals since the process started."""
    groups: dict[str, dict[str, OperationStatistics]] = {}
    with _lock:
        for (group, name), (calls, nbytes, seconds, blocked) in _totals.items():
            groups.setdefault(group, {})[name] = OperationStatistics(int(calls), int(nbytes), seconds, blocked)
    return Statistics(groups)
