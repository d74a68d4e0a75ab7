"""Any function of outputs and target, or any metric of torchmetrics, as a metric."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.base.errors import TrainingError, UsageError
from hpctrain.contracts.metric import Metric, RunningMetric, SummedMetric, as_number
from hpctrain.registry.blame import users_code
from hpctrain.registry.user_code.reference import refuse_arguments, resolve


class UserMetric(Metric):
    """Calls callable(outputs, target, **options), or makes an object with `update` and `compute` of callable(**options)."""

    name = "package.module:callable"

    def __init__(self, reference: str, options: dict[str, Any]) -> None:
        """Raise UsageError for a callable that does not exist or does not take the options."""
        super().__init__(options)
        self.name = reference  # type: ignore[misc]  # as in the job file, for messages
        self._function = resolve(reference)
        is_class = inspect.isclass(self._function)
        refuse_arguments(reference, self._function, options, *(() if is_class else ("outputs", "target")))
        # a class that the job names itself can't know a model's kind of outputs
        self.takes_logits = is_class and self._function.__module__.partition(".")[0] == "torchmetrics"

    def start(self) -> RunningMetric:
        what, label = f"[[metric]] name = {self.name!r}", self.name.rpartition(":")[2].rpartition(".")[2].lower()
        if not inspect.isclass(self._function):
            return _Mean(what, label, partial(self._function, **self.options))
        with users_code(what):
            metric: Any = self._function(**self.options)
        if not (callable(getattr(metric, "update", None)) and callable(getattr(metric, "compute", None))):
            raise UsageError(
                f"{what}: expected a function of outputs and target, or a class of torchmetrics with update and compute"
            )
        return _Torchmetrics(what, label, metric)


class _Mean(SummedMetric):
    """A scalar is taken as the mean over the rows of the micro batch, a tensor as one value per row, a pair as sum and count."""

    def __init__(self, what: str, label: str, function: Callable[..., Any]) -> None:
        """what: the subject of sentences about errors. label: the value's name."""
        super().__init__()
        self._what, self._label, self._function = what, label, function

    def measure(self, outputs: Any, target: Tensor) -> Sequence[Tensor | float]:
        with users_code(self._what):
            value = self._function(outputs, target)
        if isinstance(value, tuple) and len(value) == 2:
            return [as_number(self._what, number) for number in value]
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0):
            return value * len(target), len(target)  # weighted by rows: the last micro batch may be smaller
        if isinstance(value, Tensor) and len(value) == len(target) == value.numel():
            return value.double().sum(), len(target)
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise TrainingError(
            f"{self._what} returned {shape}, expected a number (the mean over the micro batch), a tensor ({len(target)},), or a "
            "pair (sum, count)"
        )

    def values(self, sums: Sequence[float]) -> dict[str, float]:
        total, count = sums
        return {self._label: total / count if count else float("nan")}


class _Torchmetrics(RunningMetric):
    """A metric of torchmetrics, which sums its own states over the ranks."""

    def __init__(self, what: str, label: str, metric: Any) -> None:
        self._what, self._label, self._metric, self._has_begun = what, label, metric, False

    def update(self, outputs: Any, target: Tensor) -> None:
        if not self._has_begun and hasattr(self._metric, "to"):
            self._metric.to(target.device)
        self._has_begun = True
        with users_code(self._what):
            self._metric.update(outputs, target)

    def compute(self, group: dist.ProcessGroup) -> dict[str, float]:
        begun = torch.tensor(int(self._has_begun))
        dist.all_reduce(begun, group=group)
        if not begun:
            return {}
        if begun < group.size():  # the others would gather states that a rank without samples lacks
            raise UsageError(
                f"{self._what}: only {int(begun)} of {group.size()} data-parallel ranks had a sample to evaluate, and a class of "
                "torchmetrics needs one on each; evaluate more samples"
            )
        parts = self._metric.values() if isinstance(self._metric, nn.ModuleDict) else ()  # of a MetricCollection
        for metric in (self._metric, *parts):
            metric.process_group = group
        with users_code(self._what):
            result = self._metric.compute()
        if isinstance(result, Mapping):
            return {str(name): as_number(f"{self._what}: {name}", value) for name, value in result.items()}
        result = result.flatten().tolist() if hasattr(result, "flatten") else result
        values = [as_number(self._what, value) for value in (result if isinstance(result, (list, tuple)) else [result])]
        label = self._label
        return {label: values[0]} if len(values) == 1 else {f"{label}_{i}": value for i, value in enumerate(values)}
