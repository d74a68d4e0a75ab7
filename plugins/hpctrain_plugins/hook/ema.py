"""An exponential moving average of the weights (Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging",
1992), sharded as the weights are, evaluated in their place, and saved beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hpctrain.api import Field, Hook, LiveModel, Options, Piece, Plan, PluginState, Problem, hookimpl


class EmaOptions(Options):
    decay: float = Field(default=0.999, gt=0, lt=1, description="what remains of the average at each update")
    every_steps: int = Field(default=1, ge=1, description="steps between updates")
    warmup: bool = Field(
        default=False, description="begin with a smaller decay: (1 + n) / (10 + n) after n times every_steps"
    )
    start_step: int = Field(default=0, ge=0, description="until this step the average is the weights themselves")


class Ema(Hook):
    """Averages the trained parameters over the steps; evaluations use the averages."""

    name = "ema"
    Options = EmaOptions
    options: EmaOptions

    def problems(self, plan: Plan) -> list[Problem]:
        if not plan.sharding.ranks_diverge:
            return []
        why = (
            f"with [sharding] {plan.sharding.name} each rank trains weights of its own, whose averages would differ between ranks, "
            "too; leave one of them out"
        )
        return [Problem(why)]

    def start(self) -> _Average:
        return _Average(self.options)


class _Average:
    """The averages of this rank's pieces, in float32 at least: a bfloat16 would not change by a thousandth."""

    def __init__(self, options: EmaOptions) -> None:
        self._options = options
        self._pieces: Sequence[Piece] = ()
        self._averages: list[Tensor] = []
        # the model's own values while the averages are in their place
        self._weights: list[Tensor] = []
        self._restored = False

    @hookimpl
    def hpctrain_state(self, model: LiveModel) -> PluginState:
        self._pieces = model.pieces
        self._averages = [_widened(piece.tensor.detach()) for piece in self._pieces]
        pieces = [replace(piece, tensor=own) for piece, own in zip(self._pieces, self._averages, strict=True)]
        return PluginState("ema", pieces, restore=self._restore)

    def _restore(self, values: dict[str, Any]) -> None:
        self._restored = True

    @hookimpl
    def hpctrain_job_start(self) -> None:
        if not self._restored:  # a new run, or one whose checkpoint has no averages
            self._take(0.0)

    @hookimpl
    def hpctrain_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        if step <= self._options.start_step:
            self._take(0.0)
        elif step % self._options.every_steps == 0 and not metrics.get("skipped"):
            updates = (step - self._options.start_step) // self._options.every_steps
            begin = (1 + updates) / (10 + updates) if self._options.warmup else 1.0
            self._take(min(begin, self._options.decay))

    def _take(self, decay: float) -> None:
        weights = [p.tensor.detach().to(own.dtype) for p, own in zip(self._pieces, self._averages, strict=True)]
        if weights:  # all at once, for a launch or two on a GPU; a rank may hold no piece
            get_ema_multi_avg_fn(decay)(self._averages, weights, 0)

    @hookimpl
    def hpctrain_evaluation_start(self, model: LiveModel) -> None:
        self._weights = [piece.tensor.detach().clone() for piece in self._pieces]
        self._put(self._averages, model)

    @hookimpl
    def hpctrain_evaluation_end(self, model: LiveModel) -> None:
        self._put(self._weights, model)
        self._weights = []

    @torch.no_grad()
    def _put(self, values: Sequence[Tensor], model: LiveModel) -> None:
        for piece, value in zip(self._pieces, values, strict=True):
            piece.tensor.copy_(value)
        model.refresh()


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)


@hookimpl
def hpctrain_hook() -> list[type[Hook]]:
    return [Ema]
