"""The slot `activation_checkpointing`: the choice of the activations that are kept for the backward pass."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.contracts.model import ModelSpec
from hpctrain.contracts.plugin import Plugin


class ActivationCheckpointing(Plugin):
    """Trades activation memory for a second forward pass."""

    is_compiled: ClassVar[bool] = False
    """Whether `[compile]` compiles the blocks as `apply` leaves them. If not, `apply` gets blocks whose forward is compiled."""

    @abstractmethod
    def apply(self, module: nn.Module, spec: ModelSpec, replicas: DeviceMesh | None) -> None:
        """Change the blocks of `module` in place without renaming any parameter.

        replicas: the one-dimensional mesh of ranks whose blocks get the same inputs (see
        `AxisTraits.repeats_activations`); None where each rank has inputs of its own.
        """
