"""fp16 with a dynamic or a static loss scale (Micikevicius et al., "Mixed Precision Training", 2018)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from pydantic import model_validator

from hpctrain.api import CheckpointError, Field, LossScaler, Options, Precision, hookimpl


class FP16Options(Options):
    static_scale: float | None = Field(default=None, gt=0, description="a fixed loss scale instead of the dynamic one")
    initial_scale: float = Field(default=65536.0, gt=0, description="the dynamic scale at the first step")
    window: int = Field(default=1000, ge=1, description="steps without overflow after which the scale doubles")
    hysteresis: int = Field(default=2, ge=1, description="number of overflows after which the scale halves")
    minimum_scale: float = Field(default=1.0, gt=0, description="lower bound of the scale")

    @model_validator(mode="after")
    def _in_order(self) -> FP16Options:
        if self.minimum_scale > self.initial_scale:
            raise ValueError(f"minimum_scale {self.minimum_scale:g} is above initial_scale {self.initial_scale:g}")
        return self


class FP16(Precision):
    """Matrix products in float16 (autocast), loss scaling; parameters, gradients and state in float32."""

    name = "fp16"
    Options = FP16Options
    options: FP16Options

    @property
    def parameter_dtype(self) -> torch.dtype:
        return torch.float32

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.float16)

    def start(self) -> LossScaler:
        return (
            DynamicScaler(self.options)
            if self.options.static_scale is None
            else StaticScaler(self.options.static_scale)
        )


class StaticScaler(LossScaler):
    """A scale for the whole run."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


class DynamicScaler(LossScaler):
    """Doubles the scale after `window` good steps, and halves it after `hysteresis` bad steps."""

    def __init__(self, options: FP16Options) -> None:
        self._options = options
        self.scale = options.initial_scale
        self._good_steps = 0
        self._patience = options.hysteresis

    @property
    def skips_nonfinite(self) -> bool:
        """True while the scale can still fall: an overflow at the smallest scale has another cause."""
        return self.scale > self._options.minimum_scale

    def update(self, finite: bool) -> None:
        if finite:
            self._good_steps += 1
            if self._good_steps == self._options.window:
                self.scale *= 2.0
                self._good_steps, self._patience = 0, self._options.hysteresis
            return
        self._good_steps = 0
        self._patience -= 1
        if self._patience <= 0:
            self.scale = max(self.scale / 2.0, self._options.minimum_scale)
            # the hysteresis is reset only by the next good window, so that a scale far too high falls with every step

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self._good_steps, "patience": self._patience}

    def restore(self, state: dict[str, Any]) -> None:
        if "scale" not in state:  # saved by another mode
            return
        try:
            self.scale = float(state["scale"])
            self._good_steps, self._patience = int(state["good_steps"]), int(state["patience"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"the loss scale of the checkpoint is malformed: {error!r} in {state}") from error


@hookimpl
def hpctrain_precision() -> list[type[Precision]]:
    return [FP16]
