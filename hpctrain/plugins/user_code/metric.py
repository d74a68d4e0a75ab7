"""Any function of outputs and target, or any metric of torchmetrics, as a metric."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.base.errors import TrainingError, UsageError
from hpctrain.contracts.metric import Metric, RunningMetric, SummedMetric, as_number
from hpctrain.plugins.blame import users_code
from hpctrain.plugins.user_code.reference import refuse_arguments, resolve


class UserMetric(Metric):
    """Calls callable(outputs, target, **options), or makes an object with `update` and `compute` of callable(**options)."""

    name = "package.module:callable"

    def __init__(self, reference: str, function: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__(options)
        self.name = self.reference = reference  # type: ignore[misc]  # for messages: what the job file calls it
        self._function = function
        # what is named by the job itself and can't know a model's outputs
        self.takes_logits = inspect.isclass(function) and function.__module__.partition(".")[0] == "torchmetrics"

    @classmethod
    def from_table(cls, reference: str, options: dict[str, Any]) -> UserMetric:
        """Raises UsageError for a callable that is not there or does not take the options."""
        function = resolve(reference)
        if inspect.isclass(function):
            refuse_arguments(reference, function, options)
        else:
            refuse_arguments(reference, function, options, "outputs", "target")
        return cls(reference, function, options)

    def start(self) -> RunningMetric:
        if not inspect.isclass(self._function):
            return _Mean(self.reference, self._function, self.options)
        with users_code(f"[[metric]] name = {self.reference!r}"):
            made: Any = self._function(**self.options)
        if not (callable(getattr(made, "update", None)) and callable(getattr(made, "compute", None))):
            raise UsageError(
                f"[[metric]] name = {self.reference!r}: expected a function of outputs and target, or a class of torchmetrics with "
                "update and compute"
            )
        return _Torchmetrics(self.reference, made)


def _label(reference: str) -> str:
    return reference.rpartition(":")[2].rpartition(".")[2].lower()


class _Mean(SummedMetric):
    """A scalar is taken as the mean over the rows of the micro batch, a tensor as one value per row, a pair as sum and count."""

    def __init__(self, reference: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        super().__init__()
        self._reference, self._function, self._options = reference, function, options

    def measure(self, outputs: Any, target: Tensor) -> Sequence[Tensor | float]:
        with users_code(f"[[metric]] name = {self._reference!r}"):
            value = self._function(outputs, target, **self._options)
        if isinstance(value, tuple) and len(value) == 2:
            return [as_number(f"[[metric]] name = {self._reference!r}", one) for one in value]
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0):
            return value * len(target), len(target)
        if isinstance(value, Tensor) and len(value) == len(target) == value.numel():
            return value.double().sum(), len(target)
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise TrainingError(
            f"[[metric]] name = {self._reference!r} returned {found}, expected a number (the mean over the micro batch), a tensor "
            f"({len(target)},), or a pair (sum, count)"
        )

    def values(self, sums: Sequence[float]) -> dict[str, float]:
        total, count = sums
        return {_label(self._reference): total / count if count else float("nan")}


class _Torchmetrics(RunningMetric):
    """A metric of torchmetrics, which sums its own states up over the ranks."""

    def __init__(self, reference: str, metric: Any) -> None:
        self._reference, self._metric, self._has_begun = reference, metric, False

    def update(self, outputs: Any, target: Tensor) -> None:
        if not self._has_begun and hasattr(self._metric, "to"):
            self._metric.to(target.device)
        self._has_begun = True
        with users_code(f"[[metric]] name = {self._reference!r}"):
            self._metric.update(outputs, target)

    def compute(self, group: dist.ProcessGroup) -> dict[str, float]:
        begun = torch.tensor(int(self._has_begun))
        dist.all_reduce(begun, group=group)
        if not begun:
            return {}
        if begun < group.size():
            raise UsageError(
                f"[[metric]] name = {self._reference!r}: only {int(begun)} of {group.size()} data-parallel ranks had a sample to "
                "evaluate, and a class of torchmetrics needs one on each; evaluate more samples"
            )
        for one in (self._metric, *(self._metric.values() if isinstance(self._metric, nn.ModuleDict) else ())):
            one.process_group = group
        what, label = f"[[metric]] name = {self._reference!r}", _label(self._reference)
        with users_code(what):
            found = self._metric.compute()
        if isinstance(found, Mapping):
            return {str(name): as_number(f"{what}: {name}", value) for name, value in found.items()}
        found = found.flatten().tolist() if hasattr(found, "flatten") else found
        values = [as_number(what, value) for value in (found if isinstance(found, (list, tuple)) else [found])]
        return {label: values[0]} if len(values) == 1 else {f"{label}_{i}": value for i, value in enumerate(values)}
