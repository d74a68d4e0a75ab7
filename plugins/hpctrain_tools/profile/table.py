"""The tables of operators that take most time and most memory, and of an accelerator's communication."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from hpctrain.toolkit.commands import UsageError, escaped
from hpctrain_tools.profile.communication import Communication, Transfers, together
from hpctrain_tools.profile.operators import Operator, operators_in, summed
from hpctrain_tools.profile.traces import Events, StoredWindow, told

# characters of an operator's name; names of kernels have hundreds
_WIDEST = 60


class Figures:
    """The operators of a window and its communication: of each chosen rank, and of all of them."""

    def __init__(self, window: StoredWindow, ranks: Sequence[int]) -> None:
        """ranks: those that count; none for all."""
        self.window = window
        self.of_ranks: dict[int, dict[str, Operator]] = {}
        self.communication: dict[int, list[Transfers]] = {}
        for one in window.ranks:
            if not ranks or one.rank in ranks:
                communication = Communication(window.groups)
                with told(one.trace):
                    self.of_ranks[one.rank] = operators_in(communication.seeing(Events(one.trace)))
                    self.communication[one.rank] = communication.figures()
        if not window.ranks:
            missing = "".join(f"; rank {rank}: {why}" for rank, why in window.missing.items())
            raise UsageError(f"{window.directory}: found no trace, expected that of a rank at least{missing}")
        if not self.of_ranks:
            there = ", ".join(str(one.rank) for one in window.ranks)
            raise UsageError(
                f"{window.directory}: found the traces of ranks {there}, expected one of {', '.join(map(str, ranks))}"
            )
        self.total = summed(self.of_ranks.values())

    def as_dict(self) -> dict[str, Any]:
        """The figures as JSON."""
        labels = {one.rank: one.label for one in self.window.ranks}
        return {
            "window": self.window.directory.name,
            "first": self.window.first,
            "last": self.window.last,
            "operators": _rows(self.total.values()),
            "communication": [asdict(one) for one in together(self.communication.values())],
            "ranks": [
                {
                    "rank": rank, "label": labels[rank], "operators": _rows(operators.values()),
                    "communication": [asdict(one) for one in self.communication[rank]],
                }
                for rank, operators in self.of_ranks.items()
            ],
        }  # fmt: skip

    def lines(self, most: int) -> list[str]:
        """Tables of the `most` operators: by time, and by memory if that was recorded; and of what accelerators communicated."""
        ranks = [*self.of_ranks]
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks together"
        on_device = any(one.self_device_us for one in self.total.values())
        lines = [f"By time{' on the device' if on_device else ''}, {who}", *self._by_time(most, on_device)]
        if any(one.self_cpu_bytes or one.self_device_bytes for one in self.total.values()):
            lines += ["", f"By memory, {who}", *self._by_memory(most)]
        sent = together(self.communication.values())
        if sent:
            lines += ["", f"Communication of the device, {who}", *_communication(sent[:most])]
        return lines

    def _by_time(self, most: int, on_device: bool) -> list[str]:
        cpu, device = (
            sum(getattr(one, key) for one in self.total.values()) or 1.0 for key in ("self_cpu_us", "self_device_us")
        )
        ordered = sorted(self.total.values(), key=lambda one: (-one.self_device_us, -one.self_cpu_us))
        head = ["operator", "calls", "self CPU ms", "%", "CPU ms"]
        rows = [
            [one.name, str(one.calls), _ms(one.self_cpu_us), f"{100 * one.self_cpu_us / cpu:.1f}", _ms(one.cpu_us)]
            for one in ordered[:most]
        ]
        if on_device:
            head += ["self device ms", "%"]
            rows = [
                [*row, _ms(one.self_device_us), f"{100 * one.self_device_us / device:.1f}"]
                for row, one in zip(rows, ordered, strict=False)
            ]
        return aligned([head, *rows])

    def _by_memory(self, most: int) -> list[str]:
        held = [one for one in self.total.values() if one.self_cpu_bytes or one.self_device_bytes]
        ordered = sorted(held, key=lambda one: (-one.self_device_bytes, -one.self_cpu_bytes))
        rows = [
            [one.name, str(one.calls), f"{one.self_cpu_bytes / 2**20:.2f}", f"{one.self_device_bytes / 2**20:.2f}"]
            for one in ordered[:most]
        ]
        return aligned([["operator", "calls", "self CPU MiB", "self device MiB"], *rows])


def _communication(sent: Sequence[Transfers]) -> list[str]:
    head = ["axis.operation", "calls", "device ms", "hidden ms", "exposed ms", "%", "MB", "GB/s"]
    rows = [
        [
            one.name, str(one.calls), _ms(one.us), _ms(one.us - one.exposed_us), _ms(one.exposed_us),
            f"{100 * one.exposed_us / (one.us or 1.0):.1f}", f"{one.bytes / 1e6:.3f}", f"{one.bytes / 1e3 / (one.us or 1.0):.2f}",
        ]
        for one in sent
    ]  # fmt: skip
    return aligned([head, *rows])


def _rows(operators: Iterable[Operator]) -> list[dict[str, Any]]:
    return [asdict(one) for one in sorted(operators, key=lambda one: (-one.self_device_us, -one.self_cpu_us))]


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1000:.3f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, figures to the right."""
    named = [[_short(escaped(row[0])), *row[1:]] for row in rows]
    widths = [max(map(len, column)) for column in zip(*named, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in named
    ]


def _short(name: str) -> str:
    return name if len(name) <= _WIDEST else f"{name[: _WIDEST - 3]}..."
