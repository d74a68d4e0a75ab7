"""The cost of communication in this process: seconds that callers were blocked, and bytes per group and kind of operation.

Counters are cumulative; take two snapshots and subtract. They are process-wide, but for `waited`, which is a thread's own.
Imports nothing else of hpctrain.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field


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
    """A snapshot: `blocked_seconds` is the time that callers spent inside a call or a wait, over all threads.

    groups: by `ProcessGroup.group_name`, then by the name of the operation.
    """

    blocked_seconds: float = 0.0
    groups: dict[str, dict[str, OperationStatistics]] = field(default_factory=dict)

    @property
    def operations(self) -> dict[str, OperationStatistics]:
        """The totals of all groups, by the name of the operation."""
        found = defaultdict[str, list[float]](lambda: [0, 0, 0.0, 0.0])
        for of_group in self.groups.values():
            for name, one in of_group.items():
                for place, value in enumerate((one.calls, one.bytes, one.seconds, one.blocked_seconds)):
                    found[name][place] += value
        return {name: _statistics_of(total) for name, total in found.items()}

    @property
    def bytes(self) -> int:
        """The input bytes of all operations."""
        return sum(one.bytes for of_group in self.groups.values() for one in of_group.values())

    @property
    def seconds(self) -> float:
        """Running time of all operations, overlapped with computation or not."""
        return sum(one.seconds for of_group in self.groups.values() for one in of_group.values())


class _Waited(threading.local):
    seconds = 0.0


_WAITED = _Waited()
_lock = threading.Lock()
_blocked_seconds = 0.0
_totals: dict[tuple[str, str], list[float]] = {}  # calls, bytes, seconds and blocked seconds by group and operation


def waited() -> float:
    """The seconds that this thread has waited so far."""
    return _WAITED.seconds


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
    global _blocked_seconds
    _WAITED.seconds += seconds
    with _lock:
        _blocked_seconds += seconds
        _totals.setdefault((group, operation), [0, 0, 0.0, 0.0])[3] += seconds


def statistics() -> Statistics:
    """The totals since the process started."""
    with _lock:
        blocked, totals = _blocked_seconds, {key: list(total) for key, total in _totals.items()}
    groups: dict[str, dict[str, OperationStatistics]] = {}
    for (group, name), total in totals.items():
        groups.setdefault(group, {})[name] = _statistics_of(total)
    return Statistics(blocked, groups)


def _statistics_of(total: list[float]) -> OperationStatistics:
    calls, nbytes, seconds, blocked = total
    return OperationStatistics(int(calls), int(nbytes), seconds, blocked)
