"""State of PyTorch objects that outlives lost workers."""

from __future__ import annotations

import copy
from typing import Any

import torch

from hpctrain_horovod.common.elastic import ObjectState
from hpctrain_horovod.torch.elastic.sampler import ElasticSampler
from hpctrain_horovod.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from hpctrain_horovod.torch.mpi_ops import rank


class TorchState(ObjectState):
    """Models, optimizers, samplers and plain values.

    `TorchState(model=model, optimizer=optimizer, epoch=0)`: each becomes an attribute.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        given = {"model": model, "optimizer": optimizer, **values}
        self._handled = {name: value for name, value in given.items() if hasattr(value, "state_dict")}
        for name, value in self._handled.items():
            setattr(self, name, value)
        self._states: dict[str, Any] = {}
        plain = {name: value for name, value in given.items() if name not in self._handled and value is not None}
        super().__init__(broadcast_object, rank, **plain)
        self.save()

    def save(self) -> None:
        self._states = {name: copy.deepcopy(getattr(self, name).state_dict()) for name in self._handled}
        super().save()

    def restore(self) -> None:
        for name, state in self._states.items():
            getattr(self, name).load_state_dict(copy.deepcopy(state))
        super().restore()

    def sync(self) -> None:
        for name in self._handled:
            _synchronize(getattr(self, name))
        super().sync()
        self.save()

    def reset(self) -> None:
        for name in self._handled:
            value = getattr(self, name)
            if isinstance(value, ElasticSampler):
                value.reset()


def _synchronize(value: Any) -> None:
    """Give all workers rank 0's state of one object."""
    if isinstance(value, torch.nn.Module):
        broadcast_parameters(value.state_dict(), root_rank=0)
    elif isinstance(value, torch.optim.Optimizer):
        broadcast_optimizer_state(value, root_rank=0)
    else:
        value.load_state_dict(broadcast_object(value.state_dict()))
