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
_ELEMENTS = ("In msg nelems", "Out msg nelems")
"""Keys that kineto gives to the kernels of torch's groups."""
_LIBRARIES, _UNKNOWN = ("nccl", "rccl"), "unknown"
"""Begins of the names of kernels that communicate: some have no such keys."""
_WORLD, _OTHER, _MESH = "default_pg", "other", "mesh_"
"""torch's descriptions of the group of all ranks, and of an axis's group, which begins so; and ours of any other."""
_OUR_NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "_allgather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_to_allv": "all_to_all",
}
_BYTES = {
    "Double": 8, "Long": 8, "ComplexFloat": 8, "ComplexDouble": 16, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2,
}  # fmt: skip
"""Bytes of an element, by c10's names; all other types have one."""


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

    def __init__(self, place: Mapping[str, Sequence[int]], size: int) -> None:
        """place: the rank's place on each axis, and the axis's size. size: the number of ranks."""
        # torch has no group apart for an axis of all ranks
        self._axis_of_all = next((axis for axis, (_, ranks) in place.items() if ranks == size), "world")
        self._axes = frozenset(place)
        self._of: dict[tuple[str, str] | None, tuple[array[float], array[float], array[int]]]
        self._of = defaultdict(lambda: (array("d"), array("d"), array("q")))
        """Begins, ends and bytes of the kernels of an axis's operations, and without bytes of those that compute."""

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
        ends.append(begin + event.get("dur", 0))
        sizes.append(0 if operation is None else _bytes(args, operation))

    def figures(self) -> list[Transfers]:
        """The operations by axis and kind, the longest exposed ones first."""
        begins, ends, _ = self._of[None]
        busy, found = _Union(np.array(begins), np.array(ends)), []
        for of, columns in self._of.items():
            if of is None:
                continue
            begin, end, sizes = map(np.array, columns)
            lengths, hidden = end - begin, busy.until(end) - busy.until(begin)
            us, exposed_us = float(lengths.sum()), float((lengths - hidden).sum())
            found.append(Transfers(*of, len(sizes), int(sizes.sum()), us, exposed_us))
        return _in_order(found)

    def _axis(self, args: Mapping[str, Any]) -> str:
        group = str(args.get(_GROUP, ""))
        if group == _WORLD:
            return self._axis_of_all
        axis = group.removeprefix(_MESH)
        return axis if axis in self._axes else _OTHER


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
        self._before = np.append(0.0, np.cumsum(self._ends - self._begins))
        """The covered time before each span, and before the end."""

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
