"""The slot `precision`: the dtype of parameters and arithmetic, and the scaling of the loss."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.contracts.plugin import Plugin


class Precision(Plugin):
    """The loop's order is: forward() -> scale -> backward -> unscale -> (all finite?) -> clip -> step -> update."""

    @property
    @abstractmethod
    def parameter_dtype(self) -> torch.dtype:
        """The dtype that parameters, gradients and optimizer state are held in."""

    def describe(self, device: torch.device) -> str:
        """The mode that `device` computes in, for the screen."""
        return self.name

    def unfit(self, device: torch.device) -> str | None:
        """Why `device` cannot run this mode, as the end of a sentence; None when it can."""
        return None

    def convert(self, module: nn.Module) -> None:
        """Exchange modules for ones that compute in this mode, in place and without renaming a parameter.

        Called before anything is cut, on the meta device where the model can be built there.
        """
        return

    @abstractmethod
    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        """A context around forward and loss."""

    def scale(self, loss: Tensor) -> Tensor:
        """The loss that backward starts from."""
        return loss

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Undo `scale` on the reduced gradients, in place."""
        return

    @property
    def skips_nonfinite(self) -> bool:
        """Whether a step with a gradient that is not finite is left out (dynamic loss scaling) rather than an error."""
        return False

    def update(self, finite: bool) -> None:
        """Learn whether this step's gradients were finite on every rank."""
        return

    def state(self) -> dict[str, Any]:
        """What a resume must restore, as JSON values."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave; in a run of another mode that may have been something else, or nothing."""
        return
