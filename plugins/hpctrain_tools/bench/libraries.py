"""Training loops of other libraries: Accelerate, Lightning's Fabric, DeepSpeed. Each is imported when its loop is built."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.api import is_accelerator
from hpctrain_tools.bench.trainers import Ddp, Fsdp2, Trainer


class WithAccelerate(Trainer):
    """Accelerate's `prepare`, `accumulate` by hand, `backward` and `clip_grad_norm_`."""

    name, alone = "accelerate", False

    def wrap(self) -> None:
        threads = torch.get_num_threads()
        self._accelerator = import_module("accelerate").Accelerator(cpu=not is_accelerator(self._task.device))
        torch.set_num_threads(threads)  # which Accelerate sets where no variable does
        self._module, self._optimizer = self._accelerator.prepare(
            self._plain, self._task.optimizer(self._plain, "inner.")
        )

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._accelerator.no_sync(self._module)

    def backward(self, loss: Tensor) -> None:
        self._accelerator.backward(loss)

    def clip(self, limit: float) -> None:
        self._accelerator.clip_grad_norm_(self._module.parameters(), limit)


class WithLightning(Trainer):
    """Lightning's Fabric with its DDPStrategy."""

    name, alone = "lightning", False

    def wrap(self) -> None:
        device, strategies = self._task.device, import_module("lightning.fabric.strategies")
        environment = import_module("lightning.fabric.plugins.environments").TorchElasticEnvironment()
        nodes = max(1, dist.get_world_size() // int(os.environ["LOCAL_WORLD_SIZE"]))
        self._fabric = import_module("lightning.fabric").Fabric(
            accelerator=device.type if is_accelerator(device) else "cpu",
            devices=int(os.environ["LOCAL_WORLD_SIZE"]), num_nodes=nodes,
            strategy=strategies.DDPStrategy(cluster_environment=environment, gradient_as_bucket_view=True),
        )  # fmt: skip
        self._fabric.launch()
        self._module, self._optimizer = self._fabric.setup(self._plain, self._task.optimizer(self._plain, "inner."))

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = self._fabric.no_backward_sync(self._module, enabled=not last)
        return found

    def backward(self, loss: Tensor) -> None:
        self._fabric.backward(loss)

    def clip(self, limit: float) -> None:
        self._fabric.clip_gradients(self._module, self._optimizer, max_norm=limit)


class WithDeepSpeed(Trainer):
    """DeepSpeed's engine with ZeRO stage 1, which accumulates as many micro batches as a step of the job has."""

    name, alone = "deepspeed", False

    def wrap(self) -> None:
        table = self._task.job.batch
        self._engine, self._optimizer, _, _ = import_module("deepspeed").initialize(
            model=self._plain,
            optimizer=self._task.optimizer(self._plain, "inner."),
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": table.micro_size or 1,
                "gradient_accumulation_steps": 1,
                "gradient_clipping": self._limit or 0.0,
                "zero_optimization": {"stage": 1},
                "zero_allow_untested_optimizer": True,
            },
        )
        self._module, self._limit = self._engine, None

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        self._engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()

    def update(self) -> None:
        self._engine.step()


PEERS: dict[str, type[Trainer]] = {one.name: one for one in (Ddp, Fsdp2, WithAccelerate, WithLightning, WithDeepSpeed)}
"""Trainers of a whole job by their names."""


def missing(name: str) -> str:
    """The line that says why a trainer is left out; "" where its library is installed."""
    if name in ("accelerate", "lightning", "deepspeed") and importlib.util.find_spec(name) is None:
        return f"{name} is not installed (pip install {name})"
    return ""
