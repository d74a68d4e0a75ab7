"""Ends a run whose evaluation loss no longer falls (Prechelt, "Early Stopping - But When?", 1998)."""

from __future__ import annotations

import math
from typing import Any

from hpctrain.api import Control, Field, Hook, Options, Plan, PluginState, Problem, hookimpl


class EarlyStoppingOptions(Options):
    patience: int = Field(
        default=3, ge=1, description="evaluations in a row without a lower loss after which the run ends"
    )
    minimum_change: float = Field(
        default=0.0, ge=0, description="a loss is lower if it is below the lowest so far by more than this"
    )


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
    def hpctrain_job_start(self, control: Control) -> None:
        self._stop_if_due(control)  # a run that had ended is not to go on

    @hookimpl
    def hpctrain_evaluation(self, metrics: dict[str, Any], control: Control) -> None:
        if metrics["evaluation_loss"] < self._best - self._options.minimum_change:
            self._best, self._since = metrics["evaluation_loss"], 0
        else:  # also where it is not a number
            self._since += 1
        self._stop_if_due(control)

    def _stop_if_due(self, control: Control) -> None:
        if self._since >= self._options.patience:
            by = f" by more than {self._options.minimum_change:g}" if self._options.minimum_change else ""
            control.stop(f"the evaluation loss has not fallen{by} below {self._best:.4f} for {self._since} evaluations")


@hookimpl
def hpctrain_hook() -> list[type[Hook]]:
    return [EarlyStopping]
