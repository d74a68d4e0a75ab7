"""The slot `metric`: measurements of an evaluation besides the loss."""

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
        """Measure a micro batch. outputs: those that the model's loss gets, but never DTensors; their logits for a metric that
        `takes_logits`. target: `ModelSpec.target` of the batch.

        Under an axis that cuts samples (context parallelism), each rank has the tokens of its part.
        Called on ranks with outputs: under a pipeline, those of the last stage.
        """

    @abstractmethod
    def compute(self, group: dist.ProcessGroup) -> dict[str, float]:
        """The metrics by name, over all ranks of `group`, which had different samples. Collective.

        Equal on all ranks that had outputs. Other ranks call it, too, and their results are ignored.
        """


def as_number(what: str, value: Any) -> float:
    """A measured value as a float. Raises TrainingError, whose subject is `what`, for text and for tensors of several elements."""
    try:
        if not isinstance(value, (str, bytes)):  # float() would take "1.5"
            return float(value)
    except (TypeError, ValueError, RuntimeError):
        pass  # the sentence below says it
    measured = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)
    raise TrainingError(f"{what} measured {measured}, expected a number")


class SummedMetric(RunningMetric):
    """A metric that follows from sums over the samples."""

    def __init__(self) -> None:
        self._sums: list[float] = []

    @abstractmethod
    def measure(self, outputs: Any, target: Tensor) -> Sequence[Tensor | float]:
        """The sums over a micro batch: the same number of them each time."""

    @abstractmethod
    def values(self, sums: Sequence[float]) -> dict[str, float]:
        """The metrics that follow from the sums over all samples."""

    def update(self, outputs: Any, target: Tensor) -> None:
        sums = [as_number(type(self).__name__, value) for value in self.measure(outputs, target)]
        self._sums = [a + b for a, b in zip(self._sums, sums, strict=True)] if self._sums else sums

    def compute(self, group: dist.ProcessGroup) -> dict[str, float]:
        count = torch.tensor(len(self._sums))  # a rank without samples doesn't know it, and adds zeros
        dist.all_reduce(count, dist.ReduceOp.MAX, group=group)
        if not count:
            return {}
        sums = torch.tensor(self._sums or [0.0] * int(count), dtype=torch.float64)
        dist.all_reduce(sums, group=group)
        return self.values(sums.tolist())
