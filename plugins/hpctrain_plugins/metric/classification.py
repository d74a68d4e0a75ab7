"""How often, and how surely, the model is right about classes: outputs are logits `(..., classes)`, the target `(...)`.

A target below 0 (cross_entropy's ignore_index is -100) is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from hpctrain.api import Field, Metric, Options, RunningMetric, SummedMetric, UsageError, hookimpl


class Accuracy(Metric):
    """The part of the samples whose largest output is the target's."""

    name = "accuracy"
    takes_logits = True

    def start(self) -> RunningMetric:
        return _Hits("accuracy", 1)


class TopKOptions(Options):
    k: int = Field(default=5, ge=1, description="the target counts as found among so many of the largest outputs")


class TopK(Metric):
    """The part of the samples whose target is among the k largest outputs."""

    name = "top-k"
    takes_logits = True
    Options = TopKOptions
    options: TopKOptions

    def start(self) -> RunningMetric:
        return _Hits(f"top_{self.options.k}", self.options.k)


class Perplexity(Metric):
    """The exponential of the mean cross entropy."""

    name = "perplexity"
    takes_logits = True

    def start(self) -> RunningMetric:
        return _Perplexity()


class _Hits(SummedMetric):
    def __init__(self, name: str, k: int) -> None:
        super().__init__()
        self._name, self._k = name, k

    def measure(self, outputs: Any, target: Tensor) -> Sequence[Tensor | float]:
        logits, labels = _counted(outputs, target)
        found = logits.topk(min(self._k, logits.shape[-1])).indices.eq(labels[:, None])
        return found.sum(), len(labels)

    def values(self, sums: Sequence[float]) -> dict[str, float]:
        found, count = sums
        return {self._name: found / count if count else math.nan}


class _Perplexity(SummedMetric):
    def measure(self, outputs: Any, target: Tensor) -> Sequence[Tensor | float]:
        logits, labels = _counted(outputs, target)
        return cross_entropy(logits.double(), labels, reduction="sum"), len(labels)

    def values(self, sums: Sequence[float]) -> dict[str, float]:
        loss, count = sums
        try:
            return {"perplexity": math.exp(loss / count) if count else math.nan}
        except OverflowError:
            return {"perplexity": math.inf}


def _counted(outputs: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (n, classes) and labels (n,) of what is counted."""
    fits = isinstance(outputs, Tensor) and outputs.shape[:-1] == target.shape and not target.is_floating_point()
    if not fits:
        shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise UsageError(
            f"[[metric]]: found outputs {shape} and a target {tuple(target.shape)} of {target.dtype}; expected logits "
            "(..., classes) and whole numbers (...)"
        )
    labels = target.flatten()
    counted = labels >= 0
    return outputs.flatten(0, -2)[counted], labels[counted]


@hookimpl
def hpctrain_metric() -> list[type[Metric]]:
    return [Accuracy, TopK, Perplexity]
