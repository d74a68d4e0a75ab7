"""Times and memory by operator, from the events of a trace, as torch's `key_averages` counts them.

That itself would let all ranks wait: 0.65 s for 2,400 events with stacks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

# ends of the categories of what runs on the CPU: operators, and the calls of a device's library in them
_ON_CPU = ("cpu_op", "_runtime", "_driver")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# the name for what is taken and given back outside of operators
_ELSEWHERE = "[memory]"


def is_of_device(event: Mapping[str, Any]) -> bool:
    """Whether it is work of an accelerator."""
    return event.get("ph") == "X" and event.get("cat") in _ON_DEVICE


@dataclass
class Operator:
    """The figures of an operator; those of itself leave out the operators that it calls."""

    name: str
    calls: int = 0
    self_cpu_us: float = 0.0
    cpu_us: float = 0.0
    self_device_us: float = 0.0
    self_cpu_bytes: int = 0
    """Taken minus given back."""
    self_device_bytes: int = 0

    def add(self, other: Operator) -> None:
        """Count the other's figures, too."""
        for one in fields(self)[1:]:
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


def summed(of_ranks: Iterable[Mapping[str, Operator]]) -> dict[str, Operator]:
    """The figures of several ranks."""
    total: dict[str, Operator] = {}
    for operators in of_ranks:
        for name, one in operators.items():
            total.setdefault(name, Operator(name)).add(one)
    return total


def operators_in(events: Iterable[Mapping[str, Any]]) -> dict[str, Operator]:
    """The figures of each operator of a rank."""
    seen = _Seen()
    for event in events:
        seen.take(event)
    return seen.figures()


class _Seen:
    """Numbers of the events seen so far, of which there may be millions."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._threads: dict[tuple[Any, Any], int] = {}
        # the operator by the number that kernels refer to
        self._of_id: dict[int, int] = {}
        # thread, begin, duration and name of each operator's call
        self._calls: list[array[Any]] = [array("q"), array("d"), array("d"), array("q")]
        # thread, time, bytes, and whether it is a device's memory
        self._memory: list[array[Any]] = [array("q"), array("d"), array("q"), array("q")]
        # the number of the operator, the kernel's own name, and its duration
        self._kernels: list[array[Any]] = [array("q"), array("q"), array("d")]

    def take(self, event: Mapping[str, Any]) -> None:
        phase, kind = event.get("ph"), str(event.get("cat", ""))
        if phase == "X" and kind.endswith(_ON_CPU):
            name = self._name(event)
            if kind == "cpu_op":
                self._of_id[event.get("args", {}).get("External id", 0)] = name
            self._add(self._calls, self._thread(event), event.get("ts", 0), event.get("dur", 0), name)
        elif is_of_device(event):
            of = event.get("args", {}).get("External id", 0)
            self._add(self._kernels, of, self._name(event), event.get("dur", 0))
        elif phase == "i" and event.get("name") == "[memory]":
            args = event["args"]
            self._add(self._memory, self._thread(event), event["ts"], args["Bytes"], int(args["Device Type"] != 0))

    def figures(self) -> dict[str, Operator]:
        names = [*self._names, _ELSEWHERE]
        found = [Operator(name) for name in names]
        self._count_calls(found)
        for of, own, duration in zip(*self._kernels, strict=True):
            found[self._of_id.get(of, own)].self_device_us += duration
        total: dict[str, Operator] = {}
        for one in found:
            if one != Operator(one.name):
                total.setdefault(one.name, Operator(one.name)).add(one)
        return total

    def _count_calls(self, found: list[Operator]) -> None:
        """Times and memory: operators of a thread lie in each other, and memory belongs to the innermost one."""
        calls, memory = ([np.array(column) for column in table] for table in (self._calls, self._memory))
        count = len(calls[0])
        thread = np.concatenate([calls[0], memory[0]])
        begin = np.concatenate([calls[1], memory[1]])
        length = np.concatenate([calls[2], np.full(len(memory[0]), -1.0)])  # behind an operator that begins with it
        around: list[tuple[int, float, Operator]] = []
        for at in np.lexsort((-length, begin, thread)).tolist():
            here, now = thread[at], begin[at]
            while around and (around[-1][0] != here or around[-1][1] <= now):
                around.pop()
            if at >= count:
                one = around[-1][2] if around else found[-1]
                _, _, taken, on_device = (column[at - count] for column in memory)
                one.self_device_bytes += int(taken) * int(on_device)
                one.self_cpu_bytes += int(taken) * (1 - int(on_device))
                continue
            duration, operator = float(length[at]), found[calls[3][at]]
            if (
                not around or around[-1][2] is not operator
            ):  # an overload that calls another one of its name counts once
                operator.calls += 1
                operator.cpu_us += duration
                operator.self_cpu_us += duration
                if around:
                    around[-1][2].self_cpu_us -= duration
            around.append((here, now + duration, operator))

    def _name(self, event: Mapping[str, Any]) -> int:
        return self._names.setdefault(str(event["name"]), len(self._names))

    def _thread(self, event: Mapping[str, Any]) -> int:
        return self._threads.setdefault((event.get("pid"), event.get("tid")), len(self._threads))

    @staticmethod
    def _add(table: list[array[Any]], *values: Any) -> None:
        for column, value in zip(table, values, strict=True):
            column.append(value)
