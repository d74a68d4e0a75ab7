"""Schedules that begin with a linear warm-up and depend on the completed share of the remaining steps."""

from __future__ import annotations

from abc import abstractmethod
from math import cos, pi, sqrt

from hpctrain.api import Field, Options, Schedule, hookimpl


class ConstantOptions(Options):
    warmup_steps: int = Field(default=0, ge=0, description="steps over which the factor grows linearly to 1")


class DecayOptions(ConstantOptions):
    final_factor: float = Field(default=0.0, ge=0, le=1, description="the factor at the last step")


class PolynomialOptions(DecayOptions):
    power: float = Field(default=1.0, gt=0, description="1 is a straight line, more falls faster at first")


class StepOptions(ConstantOptions):
    every: int = Field(default=1000, ge=1, description="steps after which the factor falls")
    gamma: float = Field(default=0.1, gt=0, le=1, description="what it is multiplied by")


class WSDOptions(DecayOptions):
    decay_share: float = Field(
        default=0.1, gt=0, le=1, description="the last share of the steps after the warm-up, which decays"
    )


class Warmup(Schedule):
    """The factor is first (step + 1) / warmup_steps, then `decayed`."""

    options: ConstantOptions

    def factor(self, step: int, steps: int) -> float:
        warmup = self.options.warmup_steps
        return (step + 1) / warmup if step < warmup else self.decayed(step - warmup, steps - warmup)

    def decayed(self, step: int, steps: int) -> float:
        """The factor at step `step` of the `steps` after the warm-up."""
        # the last step, number steps - 1, reaches a share of 1
        return self.after(min(1.0, step / max(1, steps - 1)))

    def after(self, share: float) -> float:
        """The factor when `share` (0 to 1) of the steps after the warm-up is done."""
        return 1.0


class Constant(Warmup):
    """The full learning rate after the warm-up."""

    name = "constant"
    Options = ConstantOptions


class _Decay(Warmup):
    """A decay from 1 to final_factor along a curve."""

    Options = DecayOptions
    options: DecayOptions

    @abstractmethod
    def curve(self, share: float) -> float:
        """The factor, from 1 to 0 as `share` goes from 0 to 1."""

    def after(self, share: float) -> float:
        return self.options.final_factor + (1.0 - self.options.final_factor) * self.curve(share)


class Linear(_Decay):
    """A straight line from 1 to final_factor."""

    name = "linear"

    def curve(self, share: float) -> float:
        return 1.0 - share


class Cosine(_Decay):
    """Half a cosine from 1 to final_factor (Loshchilov and Hutter, "SGDR", 2017)."""

    name = "cosine"

    def curve(self, share: float) -> float:
        return 0.5 * (1.0 + cos(pi * share))


class Polynomial(_Decay):
    """The remaining share of the steps to a power, from 1 to final_factor."""

    name = "polynomial"
    Options = PolynomialOptions
    options: PolynomialOptions

    def curve(self, share: float) -> float:
        return float((1.0 - share) ** self.options.power)


class WSD(_Decay):
    """Warm-up, stable, decay: the full rate, and at the end 1 - sqrt to final_factor (Hägele et al., "Scaling Laws and
    Compute-Optimal Training Beyond Fixed Training Durations", 2024)."""

    name = "wsd"
    Options = WSDOptions
    options: WSDOptions

    def curve(self, share: float) -> float:
        decayed = (share - (1.0 - self.options.decay_share)) / self.options.decay_share
        return 1.0 - sqrt(max(0.0, decayed))


class Step(Warmup):
    """Multiplied by gamma every so many steps."""

    name = "step"
    Options = StepOptions
    options: StepOptions

    def decayed(self, step: int, steps: int) -> float:
        return float(self.options.gamma ** (step // self.options.every))


class InverseSqrt(Warmup):
    """Falls with the square root of the step (Vaswani et al., "Attention Is All You Need", 2017)."""

    name = "inverse-sqrt"
    Options = ConstantOptions

    def decayed(self, step: int, steps: int) -> float:
        begin = max(1, self.options.warmup_steps)
        return sqrt(begin / (begin + step))


@hookimpl
def hpctrain_schedule() -> list[type[Schedule]]:
    return [Constant, Linear, Cosine, Polynomial, WSD, Step, InverseSqrt]
