"""The part of a training that a program brings: its models, and what a step does with a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpctrain.api import UsageError

if TYPE_CHECKING:
    from torch import nn

    import hpctrain


class Learner:
    """Base class of what `Training` trains; one on each rank. `setup` is needed, and `loss` or `train`."""

    loop: hpctrain.Loop
    """This rank's loop; there when `setup` is called."""
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def setup(self, loop: hpctrain.Loop) -> None:
        """Make the models: `self.model, self.optimizer = loop.setup(net, torch.optim.Adam(net.parameters()))`. Collective.

        Called again after a loss and after `set_state`, on a new object: register what is to last with
        `loop.register_for_checkpointing`.
        """
        raise UsageError(
            f"{type(self).__name__} has no setup(loop), expected one that sets self.model and self.optimizer"
        )

    def loss(self, batch: Any) -> Tensor:
        """The mean loss over this rank's rows, a scalar."""
        raise UsageError(f"{type(self).__name__} has no loss(batch), expected one, or a train(batch) of its own")

    def train(self, batch: Any) -> Mapping[str, float]:
        """Train a step on this rank's rows; returns numbers, of which the step's row has the mean over the ranks. Collective."""
        loss = self.loss(batch)
        self.loop.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss.item()}

    def evaluate(self, batch: Any) -> Mapping[str, float]:
        """Measure on this rank's rows, without training. Collective."""
        with torch.no_grad():
            return {"loss": self.loss(batch).item()}
