"""Ends a run whose evaluation loss no longer falls (Prechelt, "Early Stopping - But When?", 1998)."""

from __future__ import annotations

import math
from typing import Any

from hpctrain.api import Control, Field, Hook, Options, Plan, PluginState, Problem, hookimpl


class EarlyStoppingOptions(Options):
    patience: int = Field(
        default=3, ge=1, description="evaluations in a row without a lower loss after which the run ends"
    )
    minimum_change: float = Field(default=0.0, ge=0, description="what counts as lower: by more than this")


class EarlyStopping(Hook):
    """Ends the run, saved and with exit code 0, when the evaluation loss has stopped falling."""

    name = "early-stopping"
    Options = EarlyStoppingOptions
    options: EarlyStoppingOptions

    def problems(self, plan: Plan) -> list[Problem]:
        if plan.tables["evaluation"]["every_steps"]:
            return []
        return [Problem("it goes by the evaluation loss; expected [evaluation] every_steps, found none")]

    def start(self) -> _Watch:
        return _Watch(self.options)


class _Watch:
    """The best loss so far, and the evaluations since then; checkpoints have both, so patience outlasts a resume."""

    def __init__(self, options: EarlyStoppingOptions) -> None:
        self._options = options
        self._best, self._since = math.inf, 0

    @hookimpl
    def hpctrain_state(self) -> PluginState:
        return PluginState(
            "early-stopping", values=lambda: {"best": self._best, "since": self._since}, restore=self._restore
        )

    def _restore(self, values: dict[str, Any]) -> None:
        self._best, self._since = float(values["best"]), int(values["since"])

    @hookimpl
    def hpctrain_evaluation(self, metrics: dict[str, Any], control: Control) -> None:
        loss = metrics["evaluation_loss"]
        better = loss < self._best - self._options.minimum_change
        self._since = 0 if better else self._since + 1
        self._best = min(loss, self._best)
        if self._since == self._options.patience:
            control.stop(
                f"the evaluation loss has not fallen for {self._since} evaluations; the lowest was {self._best:.4f}"
            )


@hookimpl
def hpctrain_hook() -> list[type[Hook]]:
    return [EarlyStopping]
