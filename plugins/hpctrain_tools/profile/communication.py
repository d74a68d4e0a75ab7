"""Communication of accelerators by axis and operation, from the events of a trace: how long it ran, and how much of that was
exposed, so while the accelerator computed nothing."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

_KERNEL = "kernel"
_OPERATION, _GROUP, _TYPE = "Collective name", "Process Group Description", "dtype"
# keys that kineto gives to the kernels of torch's groups
_ELEMENTS = ("In msg nelems", "Out msg nelems")
# begins of the names of kernels that communicate: some have no such keys
_LIBRARIES, _UNKNOWN = ("nccl", "rccl"), "unknown"
# the names of the group of all ranks, which torch describes as `_DEFAULT`, and of groups of no axis, unless an axis has them
_WORLD, _OTHER = "world", "other"
_DEFAULT = "default_pg"
_OUR_NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "_allgather_base": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
    "all_to_allv": "all_to_all_single",
}
# bytes of an element, by c10's names; all other types have one
_BYTES = {
    "ComplexDouble": 16, "Double": 8, "Long": 8, "UInt64": 8, "ComplexFloat": 8, "Float": 4, "Int": 4, "UInt32": 4,
    "ComplexHalf": 4, "Half": 2, "BFloat16": 2, "Short": 2, "UInt16": 2,
}  # fmt: skip


@dataclass
class Transfers:
    """The operations of one kind over an axis."""

    axis: str
    operation: str
    calls: int = 0
    bytes: int = 0
    """This rank's input; a receive counts its output."""
    us: float = 0.0
    exposed_us: float = 0.0
    """The time in which no kernel computed."""

    @property
    def name(self) -> str:
        """The name that rows of metrics have for it."""
        return f"{self.axis}.{self.operation}"

    def add(self, other: Transfers) -> None:
        """Count the other's figures, too."""
        self.calls, self.bytes = self.calls + other.calls, self.bytes + other.bytes
        self.us, self.exposed_us = self.us + other.us, self.exposed_us + other.exposed_us


class Communication:
    """Takes the events of a rank, of which there may be millions."""

    def __init__(self, groups: Mapping[str, str]) -> None:
        """groups: the axis of each group, by torch's description of it."""
        self._axes = {_DEFAULT: _WORLD, **groups}
        self._of: dict[tuple[str, str] | None, tuple[array[float], array[float], array[int]]]
        # begins, ends and bytes of the kernels of an axis's operations, and without bytes of those that compute
        self._of = defaultdict(lambda: (array("d"), array("d"), array("q")))

    def seeing(self, events: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """The events, each of which it has seen."""
        for event in events:
            if event.get("ph") == "X" and event.get("cat") == _KERNEL:
                self._take(event)
            yield event

    def _take(self, event: Mapping[str, Any]) -> None:
        args, begin = event.get("args", {}), event.get("ts", 0)
        operation = args.get(_OPERATION) or (_UNKNOWN if str(event.get("name")).startswith(_LIBRARIES) else None)
        begins, ends, sizes = self._of[None if operation is None else (self._axis(args), _name(operation))]
        begins.append(begin)
        ends.append(begin + max(0, event.get("dur", 0)))
        sizes.append(0 if operation is None else _bytes(args, operation))

    def figures(self) -> list[Transfers]:
        """The operations by axis and kind, the longest exposed ones first."""
        begins, ends, _ = self._of[None]
        busy, found = _Union(np.array(begins), np.array(ends)), []
        for of, columns in self._of.items():
            if of is None:
                continue
            begin, end = map(np.array, columns[:2])
            lengths, hidden = end - begin, busy.until(end) - busy.until(begin)
            us, exposed_us = float(lengths.sum()), float((lengths - hidden).sum())
            found.append(Transfers(*of, len(columns[2]), sum(columns[2]), us, exposed_us))
        return _in_order(found)

    def _axis(self, args: Mapping[str, Any]) -> str:
        return self._axes.get(str(args.get(_GROUP)), _OTHER)


def together(of_ranks: Iterable[Sequence[Transfers]]) -> list[Transfers]:
    """The figures of several ranks."""
    total: dict[str, Transfers] = {}
    for figures in of_ranks:
        for one in figures:
            total.setdefault(one.name, Transfers(one.axis, one.operation)).add(one)
    return _in_order(total.values())


def _in_order(found: Iterable[Transfers]) -> list[Transfers]:
    return sorted(found, key=lambda one: (-one.exposed_us, -one.us, one.name))


class _Union:
    """The time that spans cover together."""

    def __init__(self, begins: Numbers, ends: Numbers) -> None:
        order = np.argsort(begins, kind="stable")
        begins, reached = begins[order], np.maximum.accumulate(ends[order])
        apart = np.append(True, begins[1:] > reached[:-1])[: len(begins)]
        self._begins = begins[apart]
        self._ends = reached[np.append(apart[1:], True)[: len(begins)]]
        # the covered time before each span, and before the end
        self._before = np.append(0.0, np.cumsum(self._ends - self._begins))

    def until(self, times: Numbers) -> Numbers:
        """The covered time before each of `times`."""
        if not len(self._begins):
            return np.zeros_like(times)
        span = np.searchsorted(self._begins, times, side="right") - 1
        inside = np.minimum(times, self._ends[span]) - self._begins[span]
        return np.where(span < 0, 0.0, self._before[span] + inside)


def _name(operation: str) -> str:
    return _OUR_NAMES.get(operation, str(operation))


def _bytes(args: Mapping[str, Any], operation: str) -> int:
    elements = args.get(_ELEMENTS[operation == "recv"], 0)
    return int(elements) * _BYTES.get(str(args.get(_TYPE)), 1)
