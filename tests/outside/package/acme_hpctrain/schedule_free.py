"""Schedule-free SGD (Defazio et al., "The Road Less Scheduled", 2024): an optimizer whose weights differ in training."""

from __future__ import annotations

import torch

from hpctrain.api import Field, Optimizer, OptimizerOptions, hookimpl


class ScheduleFreeOptions(OptimizerOptions):
    beta: float = Field(default=0.9, gt=0, lt=1, description="the share of the mean in the weights of training")


class ScheduleFreeSGD(torch.optim.Optimizer):
    """Trains on y = (1 - beta) z + beta x; all else wants x, the mean of the z so far."""

    def __init__(self, groups, lr, beta):
        super().__init__(groups, {"lr": lr, "beta": beta, "trains": False, "steps": 0})

    @torch.no_grad()
    def train(self):
        for group in self._turned(True):
            for p in group["params"]:
                if p in self.state:
                    p.lerp_(self.state[p]["z"], 1 - group["beta"])

    @torch.no_grad()
    def eval(self):
        for group in self._turned(False):
            for p in group["params"]:
                if p in self.state:
                    p.lerp_(self.state[p]["z"], 1 - 1 / group["beta"])

    def _turned(self, trains):
        turned = [group for group in self.param_groups if group["trains"] != trains]
        for group in turned:
            group["trains"] = trains
        return turned

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["trains"], "not in training mode"
            group["steps"] += 1
            share, beta = 1 / group["steps"], group["beta"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                mean = p.lerp(z, 1 - 1 / beta)
                z.sub_(p.grad, alpha=group["lr"])
                mean.lerp_(z, share)
                p.copy_(mean.lerp_(z, 1 - beta))


class ScheduleFree(Optimizer):
    """Schedule-free SGD."""

    name = "schedule-free"
    Options = ScheduleFreeOptions

    def build(self, groups):
        return ScheduleFreeSGD(groups, lr=self.options.lr, beta=self.options.beta)


@hookimpl
def hpctrain_optimizer():
    return [ScheduleFree]
