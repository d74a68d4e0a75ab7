"""The cost of communication in this process: seconds that callers were blocked, and bytes per kind of operation.

Counters are cumulative and process-wide; take two snapshots and subtract. Imports nothing else of hpctrain than the count of waits.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from hpctrain.base.waiting import note_waited


@dataclass(frozen=True)
class OperationStatistics:
    """Totals of one kind of operation.

    calls: number of operations. bytes: this rank's input (a receive counts its output). seconds: running time of the
    operations, whether or not a caller waited for them.
    """

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Statistics:
    """A snapshot: `blocked_seconds` is the time that callers spent inside a call or a wait, over all threads."""

    blocked_seconds: float = 0.0
    operations: dict[str, OperationStatistics] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The input bytes of all operations."""
        return sum(operation.bytes for operation in self.operations.values())

    @property
    def seconds(self) -> float:
        """Running time of all operations, overlapped with computation or not."""
        return sum(operation.seconds for operation in self.operations.values())


_lock = threading.Lock()
_blocked_seconds = 0.0
_totals: dict[str, list[float]] = {}


def record(name: str, nbytes: int, seconds: float) -> None:
    """Count one finished operation."""
    with _lock:
        total = _totals.setdefault(name, [0, 0, 0.0])
        total[0] += 1
        total[1] += nbytes
        total[2] += seconds


def record_blocked(seconds: float) -> None:
    """Count the time a caller was blocked."""
    global _blocked_seconds
    note_waited(seconds)
    with _lock:
        _blocked_seconds += seconds


def statistics() -> Statistics:
    """The totals since the process started."""
    with _lock:
        operations = {
            name: OperationStatistics(int(calls), int(nbytes), seconds)
            for name, (calls, nbytes, seconds) in _totals.items()
        }
        return Statistics(_blocked_seconds, operations)
