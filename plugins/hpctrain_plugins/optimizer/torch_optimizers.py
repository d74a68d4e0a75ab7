"""torch's AdamW, Adam and SGD, fused if torch has a fused form for the device and dtype."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from pydantic import model_validator

from hpctrain.api import Field, Optimizer, OptimizerOptions, Options, hookimpl

_FUSED_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Decay = Annotated[float, Field(ge=0, lt=1)]
"""The fraction of a running mean that is kept per step."""


class AdamWOptions(OptimizerOptions):
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.999), description="decay of the running mean and variance")
    eps: float = Field(default=1e-8, gt=0, description="added to the root of the variance")
    weight_decay: float = Field(default=0.01, ge=0, description="decoupled weight decay per step, times lr")


class AdamOptions(OptimizerOptions):
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.999), description="decay of the running mean and variance")
    eps: float = Field(default=1e-8, gt=0, description="added to the root of the variance")
    weight_decay: float = Field(default=0.0, ge=0, description="L2 penalty, added to the gradient")


class SGDOptions(OptimizerOptions):
    momentum: float = Field(default=0.0, ge=0, description="momentum factor")
    dampening: float = Field(default=0.0, ge=0, description="dampening of the momentum")
    nesterov: bool = Field(default=False, description="Nesterov momentum (needs momentum > 0, dampening 0)")
    weight_decay: float = Field(default=0.0, ge=0, description="L2 penalty, added to the gradient")

    @model_validator(mode="after")
    def _needs_momentum(self) -> SGDOptions:
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError("nesterov needs momentum above 0 and dampening 0")
        return self


class _TorchOptimizer(Optimizer):
    """Builds `algorithm` over the groups."""

    algorithm: ClassVar[type[torch.optim.Optimizer]]

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        parameters = [p for group in groups for p in group["params"]]
        plain = all(not hasattr(p, "__tensor_flatten__") and p.dtype in _FUSED_DTYPES for p in parameters)  # no DTensor
        speed: dict[str, Any] = {"fused": True} if plain else {"foreach": False}
        return self.algorithm(groups, **speed, **self.options.model_dump())


class AdamW(_TorchOptimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    name = "adamw"
    Options: ClassVar[type[Options]] = AdamWOptions
    algorithm = torch.optim.AdamW


class Adam(_TorchOptimizer):
    """Adam (Kingma and Ba, 2015)."""

    name = "adam"
    Options: ClassVar[type[Options]] = AdamOptions
    algorithm = torch.optim.Adam


class SGD(_TorchOptimizer):
    """Stochastic gradient descent with momentum."""

    name = "sgd"
    Options: ClassVar[type[Options]] = SGDOptions
    algorithm = torch.optim.SGD


@hookimpl
def hpctrain_optimizer() -> list[type[Optimizer]]:
    return [AdamW, Adam, SGD]
