"""The figures that ranks exchange of a step: losses, also by name, the gradient's norm, memory, times, requests to stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.devices import is_accelerator, to_device
from hpctrain.base.errors import TrainingError
from hpctrain.ranks.json_collectives import gather_values

T = TypeVar("T")
_LEFT_OUT: Any = 0.0
_NONE: Any = ()

Figure: TypeAlias = float | Tensor
"""A number, or a scalar tensor that may be on a device that has not computed it yet."""


@dataclass(frozen=True)
class RankFigures(Generic[T]):
    """Figures that ranks tell each other of a step, as the device has them (Figure) or as numbers.

    A step of `hpctrain run` has one exchange. A program's loop has one before each update and one at the end of the step: each
    omits the other's fields. Sequences are as long on every rank.
    """

    loss: T = _LEFT_OUT
    """Sum of the rank's losses that no other rank counts."""

    square: T = _LEFT_OUT
    """Sum of the squares of the rank's gradients; of replicas, where ranks hold parts, one rank counts them."""

    route: T = _LEFT_OUT
    """TrainedModel.route."""

    terms: T = _LEFT_OUT
    """Tokens or samples that the rank's losses are summed over, 1 for a program's mean; 0 where another rank counts them."""

    count: T = _LEFT_OUT
    """The terms of the global batch."""

    stop: T = _LEFT_OUT
    """The level of a request to stop, 0 for none."""

    request: T = _LEFT_OUT
    """1 if another terminal has asked something of this rank."""

    saves: T = _LEFT_OUT
    """1 if the program has asked for a checkpoint."""

    replicas: Sequence[T] = _NONE
    """Replicas.glance of each model."""

    times: Sequence[T] = _NONE
    """The rank's seconds by the PARTS of meters/clock.py."""

    own_times: Sequence[T] = _NONE
    """The same without waits for other ranks; "data" is all loading, ahead of the step or not."""

    operations: T = _LEFT_OUT
    """Floating-point operations."""

    memory: Sequence[T] = _NONE
    """Bytes by the KINDS of meters/memory.py."""

    of_runner: Sequence[T] = _NONE
    """Runner.figures."""

    named: Sequence[T] = _NONE
    """NamedLosses.figures, or the numbers that a program has logged."""

    used: Sequence[T] = _NONE
    """Trained._used_bits."""

    def exchanged(self, gather: Callable[[list[T]], Sequence[Sequence[float]]]) -> list[RankFigures[float]]:
        """Each rank's figures, equal on all ranks. gather: tells all ranks this one's numbers. Collective."""
        # one exchange of all: each costs a round between the ranks, and on an accelerator a wait for the device
        of_fields = [value if isinstance(value, (list, tuple)) else [value] for value in vars(self).values()]
        ranks = []
        for row in gather([number for numbers in of_fields for number in numbers]):
            numbers, figures = iter(row), dict[str, Any]()
            for name, value in vars(self).items():
                is_sequence = isinstance(value, (list, tuple))
                figures[name] = list(islice(numbers, len(value))) if is_sequence else next(numbers)
            ranks.append(RankFigures(**figures))
        return ranks


def gather_row(values: Sequence[Figure], device: torch.device) -> list[list[float]]:
    """Every rank's `values`, equal on all ranks. Waits for `device` once, at the end."""
    if dist.get_world_size() == 1 and not is_accelerator(device):
        return [[float(value) for value in values]]
    numbers = [0.0 if isinstance(value, Tensor) else value for value in values]
    mine = to_device(torch.tensor(numbers, dtype=torch.float64), device)  # one copy to the device for all numbers
    for place, value in enumerate(values):
        if isinstance(value, Tensor):
            mine[place] = value  # on the device: float(value) would wait for it
    if dist.get_world_size() == 1:
        return [mine.tolist()]
    everyone = torch.empty(dist.get_world_size(), len(values), dtype=torch.float64, device=device)
    dist.all_gather_single(everyone, mine[None])
    return everyone.tolist()


class NamedLosses:
    """Collects on this rank what the losses of a dict come to, until they are summed."""

    def __init__(self, share: float) -> None:
        """share: the weight of this rank's losses: 0 if another rank counts the same ones."""
        self._share = share
        self._mine: dict[str, Tensor] = {}
        self._names: list[str] | None = None

    def add(self, losses: Mapping[str, Tensor]) -> None:
        """The losses of one micro batch, each a scalar."""
        for name, value in losses.items():
            self._mine[name] = self._mine.get(name, torch.zeros_like(value, dtype=torch.float64)) + value.detach()

    def forget(self) -> None:
        """Begin anew, also with the names."""
        self._mine, self._names = {}, None

    def figures(self) -> list[Figure]:
        """This rank's sum for each name, and begin anew; as many on every rank, none for a model with one loss.

        The names are those of the first call, which is collective: only ranks with the model's outputs know them. Raises
        TrainingError for other names.
        """
        mine, self._mine = self._mine, {}  # before any error: the next step begins anew
        if self._names is None:
            self._names = list(dict.fromkeys(name for names in gather_values(list(mine)) for name in names))
        new = [name for name in mine if name not in self._names]
        if new:
            raise TrainingError(
                f"the model reports {new[0]!r}, expected the names of the first step: {', '.join(self._names) or 'none'}"
            )
        return [mine[name] * self._share if name in mine else 0.0 for name in self._names]

    def means(self, figures: Sequence[Sequence[float]], count: float) -> dict[str, float]:
        """Each name's sum over all ranks' `figures` divided by `count`."""
        sums = [sum(column) for column in zip(*figures, strict=True)]
        return {name: value / count for name, value in zip(self._names or [], sums, strict=True)}
