"""The optimizer of a program's loop."""

from __future__ import annotations

from typing import Any

import torch

from hpctrain.base.errors import UsageError
from hpctrain.library.trained import Trained


class OwnOptimizer(torch.optim.Optimizer):
    """Steps over the pieces of the model that this rank holds. `step` is collective."""

    def __init__(self, trained: Trained) -> None:  # not torch's: it has no parameters of its own
        self._trained = trained

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        return self._trained.model.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups, over this rank's pieces. A learning rate that the program sets holds until the schedule sets one."""
        return self._optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of this rank's pieces."""
        return self._optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The options of groups that have none of their own."""
        return self._optimizer.defaults

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Unscale, judge, clip and update, on all ranks or on none. Collective."""
        if closure is not None:
            raise UsageError("step: found a closure, which evaluates the model several times a step; expected none")
        self._trained.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients: the next backward begins anew."""
        self._trained.zero_grad()

    def add_param_group(self, param_group: Any) -> None:
        """Raises UsageError: nobody would sum the gradients of these parameters."""
        raise UsageError("add_param_group: expected the optimizer to have all its groups when setup gets it")

    def state_dict(self) -> dict[str, Any]:
        """Raises UsageError: a checkpoint of the loop has it."""
        raise UsageError("state_dict: the loop's checkpoints have the optimizer's state, of which a rank holds a part")

    def load_state_dict(self, state_dict: Any) -> None:
        """Raises UsageError: a resume restores it."""
        raise UsageError("load_state_dict: a resume of the loop restores the optimizer's state")
