"""Constant, linear and cosine schedules, each with a linear warm-up."""

from __future__ import annotations

from abc import abstractmethod
from math import cos, pi

from hpctrain.api import Field, Options, Schedule, hookimpl


class ConstantOptions(Options):
    warmup_steps: int = Field(default=0, ge=0, description="steps over which the factor grows linearly to 1")


class DecayOptions(ConstantOptions):
    final_factor: float = Field(default=0.0, ge=0, le=1, description="the factor at the last step")


class _Warmup(Schedule):
    """Factor (step + 1) / warmup_steps first, then `after` of the share of the remaining steps that is done."""

    options: ConstantOptions

    def factor(self, step: int, steps: int) -> float:
        warmup = self.options.warmup_steps
        if step < warmup:
            return (step + 1) / warmup
        # the last step, number steps - 1, reaches a share of 1
        return self.after(min(1.0, (step - warmup) / max(1, steps - 1 - warmup)))

    @abstractmethod
    def after(self, share: float) -> float:
        """The factor when `share` (0 to 1) of the steps after the warm-up is done."""


class Constant(_Warmup):
    """The full learning rate after the warm-up."""

    name = "constant"
    Options = ConstantOptions

    def after(self, share: float) -> float:
        return 1.0


class Linear(_Warmup):
    """A straight line from 1 to final_factor."""

    name = "linear"
    Options = DecayOptions
    options: DecayOptions

    def after(self, share: float) -> float:
        return 1.0 + share * (self.options.final_factor - 1.0)


class Cosine(_Warmup):
    """Half a cosine from 1 to final_factor (Loshchilov and Hutter, "SGDR", 2017)."""

    name = "cosine"
    Options = DecayOptions
    options: DecayOptions

    def after(self, share: float) -> float:
        low = self.options.final_factor
        return low + (1.0 - low) * 0.5 * (1.0 + cos(pi * share))


@hookimpl
def hpctrain_schedule() -> list[type[Schedule]]:
    return [Constant, Linear, Cosine]
