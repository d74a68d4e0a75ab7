"""The one-cycle policy (Smith and Topin, "Super-Convergence: Very Fast Training of Neural Networks Using Large Learning
Rates", 2018)."""

from __future__ import annotations

from math import cos, pi

from hpctrain.api import Field, Options, Schedule, hookimpl


class OneCycleOptions(Options):
    rising_share: float = Field(
        default=0.3, gt=0, lt=1, description="the share of the steps over which the factor rises"
    )
    first_factor: float = Field(default=0.04, gt=0, le=1, description="the factor at the first step")
    final_factor: float = Field(default=4e-6, ge=0, le=1, description="the factor at the last step")


class OneCycle(Schedule):
    """Half a cosine up from first_factor to 1, then half a cosine down to final_factor."""

    name = "one-cycle"
    Options = OneCycleOptions
    options: OneCycleOptions

    def factor(self, step: int, steps: int) -> float:
        options = self.options
        top = options.rising_share * steps - 1
        if step < top:
            return _between(options.first_factor, 1.0, step / top)
        return _between(1.0, options.final_factor, min(1.0, (step - top) / max(steps - 1 - top, 1e-9)))


def _between(begin: float, end: float, share: float) -> float:
    return end + (begin - end) * 0.5 * (1.0 + cos(pi * share))


@hookimpl
def hpctrain_schedule() -> list[type[Schedule]]:
    return [OneCycle]
