"""Any torch optimizer class; any function of the step, or schedule of torch.optim.lr_scheduler, as a schedule."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from pydantic import ConfigDict
from torch import nn

from hpctrain.base.errors import TrainingError, UsageError
from hpctrain.contracts.optimization import Optimizer, OptimizerOptions, Schedule
from hpctrain.contracts.plugin import Options
from hpctrain.registry.blame import users_code
from hpctrain.registry.user_code.reference import refuse_arguments, resolve


class _AnyOptions(OptimizerOptions):
    """The callable's own signature decides which further options it takes."""

    model_config = ConfigDict(extra="allow")


class UserOptimizer(Optimizer):
    """Calls callable(groups, **options)."""

    name = "package.module:callable"
    Options: ClassVar[type[Options]] = _AnyOptions

    def __init__(self, reference: str, factory: Callable[..., Any], options: OptimizerOptions) -> None:
        super().__init__(options)
        self.name = reference  # type: ignore[misc]  # as in the job file, for messages
        self._factory = factory

    @classmethod
    def from_table(cls, reference: str, options: dict[str, Any]) -> UserOptimizer:
        """Raise UsageError for a callable that does not exist or does not take the options."""
        factory = resolve(reference)
        refuse_arguments(reference, factory, options, [])
        if not isinstance(options.get("lr"), (int, float)) or not options["lr"] > 0:
            raise UsageError(f"{reference} needs [optimizer] lr, a number greater than 0")
        return cls(reference, factory, _AnyOptions(**options))

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        with users_code(f"[optimizer] name = {self.name!r}"):
            optimizer = self._factory(groups, **self.options.model_dump())
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"{self.name} returned {type(optimizer).__name__}, expected a torch.optim.Optimizer")
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:  # as LBFGS has it
            raise UsageError(
                f"{self.name} evaluates the model several times a step, expected an optimizer with one evaluation per step"
            )
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise UsageError(
                f"{self.name} takes sparse gradients only, and a job's are dense; expected one such as Adam"
            )
        return optimizer


class UserSchedule(Schedule):
    """callable(step, steps, **options) is the factor; or callable(optimizer, **options) makes a scheduler of torch."""

    name = "package.module:callable"

    def __init__(self, reference: str, options: dict[str, Any]) -> None:
        """Raise UsageError for a callable that does not exist or does not take the options."""
        super().__init__(options)
        self.name = reference  # type: ignore[misc]  # as in the job file, for messages
        self._function = resolve(reference)
        first = next(iter(_parameters(self._function)), None)
        self._of_torch = inspect.isclass(self._function) or first == "optimizer"
        refuse_arguments(reference, self._function, options, *([None] if self._of_torch else [0, 1]))
        # factors of a scheduler of torch, as far as they have been asked for: it knows the next one only
        self._factors: list[float] = []
        self._scheduler: Any = None

    def factor(self, step: int, steps: int) -> float:
        with users_code(f"[schedule] name = {self.name!r}"):
            factor = self._of_scheduler(step) if self._of_torch else self._function(step, steps, **self.options)
        if not isinstance(factor, (int, float)):
            raise TrainingError(f"[schedule] name = {self.name!r} returned {type(factor).__name__}, expected a number")
        return float(factor)

    def _of_scheduler(self, step: int) -> float:
        """The rate of a scheduler over an optimizer whose rate is 1, after `step` steps."""
        if self._scheduler is None:
            optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
            scheduler = self._function(optimizer, **self.options)
            is_scheduler = isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
            if not is_scheduler or "metrics" in _parameters(scheduler.step):  # as ReduceLROnPlateau has it
                raise UsageError(
                    f"[schedule] name = {self.name!r} made {type(scheduler).__name__}, expected a scheduler of torch whose rate "
                    "depends on the step alone"
                )
            self._scheduler = scheduler
            self._factors.append(float(scheduler.get_last_lr()[0]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer takes no step
            while len(self._factors) <= step:
                self._scheduler.step()
                self._factors.append(float(self._scheduler.get_last_lr()[0]))
        return self._factors[step]


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []
