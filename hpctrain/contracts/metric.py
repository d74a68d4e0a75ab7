"""The slot `metric`: what an evaluation measures besides the loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.errors import TrainingError, shown
from hpctrain.contracts.plugin import Plugin


class Metric(Plugin):
    """A metric of the job's `[[metric]]`."""

    takes_logits: bool = False
    """Whether it measures the logits in the outputs (`ModelSpec.logits`), not all of the outputs."""

    @abstractmethod
    def start(self) -> RunningMetric:
        """Begin the measurement of one evaluation on one rank."""


class RunningMetric(ABC):
    """A measurement of one evaluation on one rank."""

    @abstractmethod
    def update(self, outputs: Any, target: Tensor) -> None:
        """A micro batch's outputs, as the model's loss gets them but never DTensors, and its target (`ModelSpec.target`).
        Of a metric that `takes_logits`, the logits in them.

        Under an axis that cuts samples (context parallelism), each rank has the tokens of its part.
        Called on the ranks that have outputs: those of a pipeline's last stage.
        """

    @abstractmethod
    def compute(self, group: dist.ProcessGroup) -> dict[str, float]:
        """The metrics by name, over all ranks of `group`, which had different samples; collective.

        Equal on all ranks that had outputs. Others call it, too, and what they return is left out.
        """


def as_number(what: str, value: Any) -> float:
    """A measured value as a float. Raises TrainingError, whose subject is `what`, for text and for tensors of several elements."""
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)
    raise TrainingError(f"{what} measured {found}, expected a number")


class SummedMetric(RunningMetric):
    """A metric that follows from sums over the samples."""

    def __init__(self) -> None:
        self._sums: list[float] = []

    @abstractmethod
    def measure(self, outputs: Any, target: Tensor) -> Sequence[Tensor | float]:
        """The sums over a micro batch, always as many."""

    @abstractmethod
    def values(self, sums: Sequence[float]) -> dict[str, float]:
        """The metrics that follow from the sums over all samples."""

    def update(self, outputs: Any, target: Tensor) -> None:
        sums = [as_number(type(self).__name__, one) for one in self.measure(outputs, target)]
        self._sums = [a + b for a, b in zip(self._sums, sums, strict=True)] if self._sums else sums

    def compute(self, group: dist.ProcessGroup) -> dict[str, float]:
        count = torch.tensor(len(self._sums))
        dist.all_reduce(count, dist.ReduceOp.MAX, group=group)
        if not count:
            return {}
        sums = torch.tensor(self._sums or [0.0] * int(count), dtype=torch.float64)
        dist.all_reduce(sums, group=group)
        return self.values(sums.tolist())
