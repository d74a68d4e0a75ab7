"""Training loops beside hpctrain's: plain PyTorch on each rank by itself, torch's DDP and torch's FSDP2."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hpctrain_tools.bench.task import LossModule, Step, Task


class Trainer:
    """A loop as its users write it: forward, backward, clip, optimizer. This one trains each rank by itself."""

    name = "plain"
    alone = True
    """Whether the ranks don't communicate: then each trains the weights of its own samples."""

    def __init__(self, task: Task) -> None:
        """Builds the model. Collective."""
        self._task, self._limit = task, task.job.optimizer.clip_norm
        self._plain = LossModule(task.parts, task.device, task.module())
        self._module: Any = self._plain
        self._optimizer: Any = None
        self.wrap()
        self._optimizer = self._optimizer or task.optimizer(self._plain, "inner.")

    def wrap(self) -> None:
        """Give the module, and the optimizer if need be, to the library."""

    def step(self, step: Step) -> Tensor:
        """Train the samples of a step; this rank's sum of losses."""
        task, count = self._task, step.own_count if self.alone else step.count
        factor = 1.0 if self.alone else float(task.ranks)  # libraries take the mean over the ranks
        for group, rate in zip(self._optimizer.param_groups, step.rates, strict=False):
            group["lr"] = rate
        total = torch.zeros((), dtype=torch.float64, device=task.device)
        for number, batch in enumerate(step.batches):
            if number < len(step.draws):
                task.restore(step.draws[number])
            with self.micro_batch(number == len(step.batches) - 1):
                loss = self._module(batch)
                self.backward(loss * (factor / max(1, count)))  # a rank's samples may have no label
            total += loss.detach()
        if self._limit is not None:
            self.clip(self._limit)
        self.update()
        return total

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """A context around a micro batch: gradients are summed over the ranks in the last one."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Backward of a micro batch."""
        loss.backward()

    def clip(self, limit: float) -> None:
        """Clip the norm of the gradients."""
        torch.nn.utils.clip_grad_norm_(self._plain.parameters(), limit)

    def update(self) -> None:
        """Take the optimizer's step."""
        self._optimizer.step()
        self._optimizer.zero_grad()


class Ddp(Trainer):
    """torch's DistributedDataParallel."""

    name, alone = "ddp", False

    def wrap(self) -> None:
        self._module = DistributedDataParallel(self._plain, gradient_as_bucket_view=True)

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._module.no_sync()


class Fsdp2(Trainer):
    """torch's fully_shard of each block and of the rest."""

    name, alone = "fsdp2", False

    def wrap(self) -> None:
        task = self._task
        mesh = init_device_mesh(task.device.type, (task.ranks,), mesh_dim_names=("bench",))
        for block in task.parts.model.blocks(self._plain.inner):
            fully_shard(block, mesh=mesh)
        fully_shard(self._plain, mesh=mesh)

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        self._module.set_requires_gradient_sync(last)
        return nullcontext()
