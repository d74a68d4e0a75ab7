"""A precision whose loss scale is a power of two, which changes no bit of a gradient in float32."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from hpctrain.api import Field, LossScaler, Options, Precision, hookimpl


class PowerOfTwoOptions(Options):
    exponent: int = Field(default=10, ge=-20, le=20, description="the loss is multiplied by 2 to the power of this")


class PowerOfTwo(Precision):
    """float32 with a scaled loss."""

    name = "power-of-two"
    Options = PowerOfTwoOptions
    options: PowerOfTwoOptions

    @property
    def parameter_dtype(self):
        return torch.float32

    def forward(self, device):
        return nullcontext()

    def start(self):
        scaler = LossScaler()
        scaler.scale = 2.0**self.options.exponent
        return scaler


@hookimpl
def hpctrain_precision():
    return [PowerOfTwo]
