"""Any torch optimizer class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from pydantic import ConfigDict

from hpctrain.base.errors import UsageError
from hpctrain.contracts.optimization import Optimizer, OptimizerOptions
from hpctrain.contracts.plugin import Options
from hpctrain.plugins.user_code.calling import users_code
from hpctrain.plugins.user_code.reference import refuse_arguments, resolve


class _AnyOptions(OptimizerOptions):
    """The callable's own signature decides which further options it takes."""

    model_config = ConfigDict(extra="allow")


class ForeignOptimizer(Optimizer):
    """Calls callable(groups, **options)."""

    name = "package.module:callable"
    Options: ClassVar[type[Options]] = _AnyOptions

    def __init__(self, reference: str, factory: Callable[..., Any], options: OptimizerOptions) -> None:
        super().__init__(options)
        self.name = self.reference = reference  # type: ignore[misc]  # its name in the job file, for messages
        self._factory = factory

    @classmethod
    def from_table(cls, reference: str, options: dict[str, Any]) -> ForeignOptimizer:
        """Raises UsageError for a callable that does not exist or does not take the options."""
        factory = resolve(reference)
        refuse_arguments(reference, factory, options, [])
        if not isinstance(options.get("lr"), (int, float)) or not options["lr"] > 0:
            raise UsageError(f"{reference} needs [optimizer] lr, a number greater than 0")
        return cls(reference, factory, _AnyOptions(**options))

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        with users_code(f"[optimizer] name = {self.reference!r}"):
            optimizer = self._factory(groups, **self.options.model_dump())
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"{self.reference} returned {type(optimizer).__name__}, expected a torch.optim.Optimizer")
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise UsageError(
                f"{self.reference} evaluates the model several times a step, expected an optimizer with one evaluation per step"
            )
        return optimizer
