"""Checks that the ranks of a program's loop do the same things in the same order; the error says where they differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpctrain.base.devices import is_accelerator
from hpctrain.base.errors import TrainingError
from hpctrain.training.figures import Figure, gather_row

BACKWARD, END_OF_STEP, END_OF_LOOP, PARAMETERS = -1, -2, -3, -4  # optimizers count from 0
# numbers in an exchange: always the same count, so that ranks that do different things still meet in one collective
_WIDTH = 64
# the first of them are the same on all ranks: action, step, detail
_SAME = 3
_CPU = torch.device("cpu")  # a comparison there waits for no accelerator


class Agreement:
    """Compares what the ranks are about to do. Collective."""

    def __init__(self, device: torch.device, alone: bool) -> None:
        """alone: whether there is one rank."""
        self._device, self._alone, self._names = device, alone, list[str]()

    def name(self, optimizer: str) -> int:
        """The number of an optimizer; all ranks name them in the same order."""
        self._names.append(optimizer)
        return len(self._names) - 1

    def on(self, action: int, step: int, values: Sequence[Figure] = (), detail: int = 0) -> list[list[float]]:
        """Every rank's values. Raises TrainingError on all ranks unless all do the same.

        action: an optimizer's number, or a constant of this module. step: completed steps. detail: a checksum of the values' names.
        Waits for an accelerator only where there are values.
        """
        if self._alone:
            return gather_row(values, self._device) if values else [[]]
        row = [float(action), float(step), float(detail), *([] if is_accelerator(self._device) else values)]
        row += [0.0] * (_WIDTH - len(row))
        rows = gather_row(row[:_WIDTH], _CPU)
        if any(other[:_SAME] != rows[0][:_SAME] for other in rows):
            raise TrainingError(self._difference(rows))
        if is_accelerator(self._device):  # its values travel on it, after the ranks have met
            return gather_row(values, self._device) if values else [[] for _ in rows]
        if len(row) > _WIDTH:  # only now: the ranks do the same, so their rows have one length
            rows = [[*start, *rest] for start, rest in zip(rows, gather_row(row[_WIDTH:], _CPU), strict=True)]
        return [numbers[_SAME : _SAME + len(values)] for numbers in rows]

    def _difference(self, rows: Sequence[Sequence[float]]) -> str:
        other = next(rank for rank, row in enumerate(rows) if row[:_SAME] != rows[0][:_SAME])
        if rows[other][:2] == rows[0][:2]:
            opens = rows[0][0] == PARAMETERS
            what, did = (
                ("parameters", "opens another model or other names") if opens else ("log", "has logged other names")
            )
            return (
                f"{what}: rank {other} {did} than rank 0 in step {rows[0][1] + 1:.0f}; expected the same on all ranks"
            )
        first, second = (self._words(*rows[rank][:2]) for rank in (0, other))
        return (
            f"the ranks of the program's loop have parted: rank 0 {first}, but rank {other} {second}; expected the same steps on "
            "all ranks: what depends on a rank's own data must not decide whether an optimizer steps"
        )

    def _words(self, action: float, step: float) -> str:
        words = {
            END_OF_LOOP: f"has left the loop after step {step:.0f}",
            BACKWARD: f"begins a backward in step {step + 1:.0f}",
            END_OF_STEP: f"ends step {step + 1:.0f}",
            PARAMETERS: f"opens parameters in step {step + 1:.0f}",
        }
        number = int(action)
        return words.get(number) or f"steps the optimizer of {self._names[number]!r} in step {step + 1:.0f}"
