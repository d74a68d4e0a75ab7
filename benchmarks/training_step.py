"""A training step assembled as in a session, without its loop, for several benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch

from hpctrain.checking.check import CheckedJob
from hpctrain.contracts.runner import MicroBatch, RunnerParts
from hpctrain.model.build import InitialValues, build_model
from hpctrain.model.gradients import GradientReducer
from hpctrain.model.mesh import Meshes
from hpctrain.model.parameters import build_optimizer, parameter_groups
from hpctrain.training.runner import PlainRunner

CPU = torch.device("cpu")


def make_step(checked: CheckedJob, meshes: Meshes, batch: dict[str, torch.Tensor], divisor: int) -> Callable[[], float]:
    """A function that trains one step on this rank's part of `batch`, which must be equal on parallel ranks.

    The function returns this rank's part of the mean loss over `divisor`.
    """
    parts = checked.parts
    sums = GradientReducer(parts.compression, meshes)
    built = build_model(checked.job, parts, meshes, sums, CPU, InitialValues())
    sharded, scaler = built.sharded, parts.precision.start()
    groups = parameter_groups(sharded.pieces(), built.trained, [])
    optimizer = sharded.optimizer(groups, partial(build_optimizer, parts.optimizer))
    for axis in built.axes:
        batch = axis.split_batch(batch)
    runner = PlainRunner(RunnerParts(sharded, parts.model, parts.precision, scaler, CPU, 0, nullcontext))

    def step() -> float:
        loss = runner.train([MicroBatch(batch, 0)], divisor, 0)
        sharded.synchronize()
        optimizer.step()
        sharded.refresh()
        return float(loss)

    return step
