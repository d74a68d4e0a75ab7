"""The ranks of a program's loop do the same things in the same order, or are told where they part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hpctrain.base.errors import TrainingError
from hpctrain.training.metrics import Figure, gather_row

END_OF_STEP, END_OF_LOOP = -1, -2


@dataclass(frozen=True)
class Told:
    """A rank's figures. loss: its part of the loss. weight: 0 where another rank counts that. square: of its gradients."""

    loss: float
    weight: float
    square: float


class Agreement:
    """Compares what the ranks are about to do. Collective."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._names = device, list[str]()

    def name(self, optimizer: str) -> int:
        """The number of an optimizer, which all ranks name in one order."""
        self._names.append(optimizer)
        return len(self._names) - 1

    def on(self, action: int, step: int, loss: Figure = 0.0, weight: float = 0.0, square: Figure = 0.0) -> list[Told]:
        """Every rank's figures. Raises TrainingError on all ranks unless all do the same.

        action: an optimizer's number, END_OF_STEP or END_OF_LOOP. step: completed ones.
        """
        rows = gather_row([float(action), float(step), loss, weight, square], self._device)
        if any(row[:2] != rows[0][:2] for row in rows):
            raise TrainingError(self._difference(rows), everywhere=True)
        return [Told(*row[2:]) for row in rows]

    def _difference(self, rows: Sequence[Sequence[float]]) -> str:
        other = next(rank for rank, row in enumerate(rows) if row[:2] != rows[0][:2])
        first, second = (self._words(*rows[rank][:2]) for rank in (0, other))
        return (
            f"the ranks of the program's loop have parted: rank 0 {first}, but rank {other} {second}; expected the same steps on "
            "all ranks; what depends on a rank's own data must not decide whether an optimizer steps"
        )

    def _words(self, action: float, step: float) -> str:
        if action == END_OF_LOOP:
            return f"has left the loop after step {step:.0f}"
        if action == END_OF_STEP:
            return f"ends step {step + 1:.0f}"
        return f"steps the optimizer of {self._names[int(action)]!r} in step {step + 1:.0f}"
