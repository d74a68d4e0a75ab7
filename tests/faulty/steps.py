"""Optimizers, schedules, precisions and activation checkpointing that break a promise."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hpctrain_plugins.precision.floating import FP32

from faulty.fault import Wrapped, of_slot, planted
from hpctrain.api import (
    ActivationCheckpointing,
    LossScaler,
    Optimizer,
    OptimizerOptions,
    Schedule,
    hookimpl,
)

# optimizer and schedule


class _SGD(torch.optim.Optimizer):
    def __init__(self, groups, lr=1e-4):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad


class _Optimizer(Optimizer):
    Options = OptimizerOptions
    made = _SGD

    def build(self, groups):
        return self.made(groups)


optimizer = lambda told: planted("optimizer", "name", told, optimizer={"lr": 0.001})  # noqa: E731


@optimizer("built an optimizer whose lr is 0.0001 where its group says 0.001")
class OwnRate(_Optimizer):
    def build(self, groups):
        return _SGD([p for group in groups for p in group["params"]])


@optimizer("built an optimizer of .* tensors, expected each of the .* in `groups` once")
class SomeParameters(_Optimizer):
    def build(self, groups):
        return _SGD([{**group, "params": group["params"][1:]} for group in groups])


@optimizer("its step updates each parameter: no parameter changed")
class NoStep(_Optimizer):
    class made(_SGD):  # noqa: N801
        def step(self, closure=None):
            pass


@optimizer("makes another step after its state and its groups' numbers were put into a new optimizer")
class HiddenMomentum(_Optimizer):
    class made(_SGD):  # noqa: N801
        @torch.no_grad()
        def step(self, closure=None):
            self.kept = getattr(self, "kept", {})
            for group in self.param_groups:
                for p in group["params"]:
                    self.kept[p] = 0.9 * self.kept.get(p, 0.0) + p.grad
                    p -= group["lr"] * self.kept[p]


schedule = lambda told: planted("schedule", "name", told)  # noqa: E731


@schedule("is a pure function of the step: gave")
class CountingSchedule(Schedule):
    calls: list[int] = []  # noqa: RUF012

    def factor(self, step, steps):
        self.calls.append(step)
        return 1 / len(self.calls)


@schedule("gave nan for step 0")
class NanSchedule(Schedule):
    def factor(self, step, steps):
        return float("nan")


@schedule("gave -0.5 for step 3")
class FallingBelowZero(Schedule):
    def factor(self, step, steps):
        return 1 - step / 2


# precision and activation checkpointing


precision = lambda told, ranks=1: planted("precision", "mode", told, ranks)  # noqa: E731


@precision("took away head.weight in convert")
class RenamingPrecision(FP32):
    def convert(self, module, spec):
        module.head = Wrapped(module.head)


@precision("trains the kit's job: .*context manager")
class NoContext(FP32):
    def forward(self, device):
        return None


@precision("scales the loss by a number above zero: its scale is 0.0")
class ZeroScale(FP32):
    def start(self):
        scaler = LossScaler()
        scaler.scale = 0.0
        return scaler


@precision(r"its scaler's state holds all .* is \d+ once \d+ was restored")
class ForgottenScale(FP32):
    class scaler(LossScaler):  # noqa: N801
        scale = 2.0

        def update(self, finite):
            self.scale *= 2

    def start(self):
        return self.scaler()


@precision("scales the loss by .* on the ranks, expected one scale on all", 2)
class ScaleByRank(FP32):
    class scaler(LossScaler):  # noqa: N801
        @property
        def scale(self):
            return 1024.0 * (1 + dist.get_rank())

    def start(self):
        return self.scaler()


checkpointing = lambda told: planted("activation_checkpointing", "mode", told)  # noqa: E731


@checkpointing("took away layers.0.* in apply")
class RenamingCheckpointing(ActivationCheckpointing):
    def apply(self, module, spec, replicas):
        module.layers[0] = Wrapped(module.layers[0])


@checkpointing("changed requires_grad of .* in apply, expected True")
class FreezingCheckpointing(ActivationCheckpointing):
    def apply(self, module, spec, replicas):
        spec.blocks(module)[0].requires_grad_(False)


@hookimpl
def hpctrain_optimizer():
    return of_slot("optimizer")


@hookimpl
def hpctrain_schedule():
    return of_slot("schedule")


@hookimpl
def hpctrain_precision():
    return of_slot("precision")


@hookimpl
def hpctrain_activation_checkpointing():
    return of_slot("activation_checkpointing")
