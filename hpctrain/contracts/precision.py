"""The slot `precision`: the dtype of parameters and arithmetic, and the scaling of the loss."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from hpctrain.contracts.model import ModelSpec
from hpctrain.contracts.plugin import Plugin


class LossScaler:
    """The scale of a run's loss. This class leaves the loss alone.

    The loop's order is: forward -> loss * scale -> backward -> gradients / scale -> (all finite?) -> clip -> step -> update.
    """

    scale: float = 1.0
    """The factor on the loss of this step, and so on every gradient until the optimizer's step."""

    @property
    def skips_nonfinite(self) -> bool:
        """Whether a gradient that is not finite means to skip the step (dynamic loss scaling), and is no error."""
        return False

    def update(self, finite: bool) -> None:
        """Learn whether this step's gradients were finite on every rank; `scale` may change."""
        return

    def state(self) -> dict[str, Any]:
        """The state that a resume must restore, as JSON values."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take a saved `state`: in a resume with another mode, it is that of the earlier mode, or empty."""
        return


class Precision(Plugin):
    """A mode of arithmetic. It is the same for all ranks of a job."""

    @property
    @abstractmethod
    def parameter_dtype(self) -> torch.dtype:
        """The dtype of parameters, gradients and optimizer state."""

    def product_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype of matrix products on `device`: that of autocast in `forward`, else that of parameters."""
        with self.forward(device):  # torch knows autocast's dtype only within it
            is_cast = torch.is_autocast_enabled(device.type)
            return torch.get_autocast_dtype(device.type) if is_cast else self.parameter_dtype

    def describe(self, device: torch.device) -> str:
        """The mode of arithmetic on `device`, for the screen."""
        return self.name

    def convert(self, module: nn.Module, spec: ModelSpec) -> None:
        """Replace modules by ones that compute in this mode, in place and without renaming a parameter.

        Called before anything is cut, on the meta device where the model can be built there.
        """
        return

    @abstractmethod
    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        """A context around forward and loss."""

    def start(self) -> LossScaler:
        """The scaling of the loss for one run."""
        return LossScaler()
