"""A training step put together as a session does, without its loop: what several benchmarks time or measure."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch

from hpctrain.checking.check import CheckedJob
from hpctrain.contracts.runner import MicroBatch, RunnerParts
from hpctrain.gradients.reducer import GradientReducer
from hpctrain.loop.runner import PlainRunner
from hpctrain.mesh import DATA_AXES, Meshes
from hpctrain.model.build import build_model
from hpctrain.model.groups import parameter_groups

CPU = torch.device("cpu")


def make_step(checked: CheckedJob, meshes: Meshes, batch: dict[str, torch.Tensor], divisor: int) -> Callable[[], float]:
    """Trains on this rank's part of `batch`, of which parallel ranks have the same, once for each call.

    It gives this rank's part of the mean loss over `divisor`.
    """
    parts, sharding = checked.parts, checked.parts.sharding
    sums = GradientReducer(parts.compression, meshes.model[DATA_AXES], "")
    built = build_model(checked.job, parts, meshes, sums, CPU)
    groups = parameter_groups(sharding.pieces(), list(built.trained), [])
    optimizer = sharding.optimizer(groups, parts.optimizer.build)
    for plugin in parts.parallelism.values():
        batch = plugin.split_batch(batch)
    runner = PlainRunner(RunnerParts(built.module, parts.model, parts.precision, sharding, CPU, 0, nullcontext))

    def step() -> float:
        loss = runner.train([MicroBatch(batch, 0)], divisor, 0)
        sharding.synchronize()
        optimizer.step()
        sharding.refresh()
        return float(loss)

    return step
