"""`hvd.elastic`: training that survives lost workers and takes new ones in."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch

from hpctrain.horovod.common.elastic import ObjectState, State, run_fn
from hpctrain.horovod.engine.errors import HorovodInternalError
from hpctrain.horovod.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hpctrain.horovod.torch.mpi_ops import init, rank, shutdown, size

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate `train(state, ...)`: a lost worker sends the others back to the last `state.commit()`; new ones join at a commit.

    Start the script with `horovodrun --min-np`. Under MPI, which cannot go on without a lost process, `train` runs once.
    """
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    while True:
        try:
            return init()
        except HorovodInternalError:
            raise
        except (OSError, RuntimeError):
            shutdown()  # another worker was lost while these met: ask for another rank


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


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Indices of this worker; those that were processed before the workers changed do not come again in this epoch."""

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch, self.processed_num = 0, 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with an order of its own."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """All workers have processed a batch of this size."""
        self.processed_num += batch_size * self.num_replicas

    def reset(self) -> None:
        """Share what is left among the present workers."""
        self.num_replicas, self.rank = size(), rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and the samples of it that are processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def __iter__(self) -> Iterator[int]:
        indices = self.remaining_indices
        if indices:  # as many for each worker: some come twice
            indices = (indices * math.ceil(self.total_size / len(indices)))[: self.total_size]
        return iter(indices[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
