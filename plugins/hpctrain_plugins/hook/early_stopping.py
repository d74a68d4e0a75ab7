"""Ends a run whose evaluation no longer improves (Prechelt, "Early Stopping - But When?", 1998)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from hpctrain.api import Control, Field, Hook, Options, Plan, PluginState, Problem, UsageError, hookimpl


class EarlyStoppingOptions(Options):
    patience: int = Field(
        default=3, ge=1, description="the run ends after this many evaluations in a row without a better value"
    )
    minimum_change: float = Field(
        default=0.0, ge=0, description="a value counts as better if it differs from the best so far by more than this"
    )
    metric: str = Field(default="loss", description='"loss", or what a [[metric]] measures, such as "accuracy"')
    mode: Literal["min", "max"] = Field(default="min", description="whether the metric is to fall or to rise")


class EarlyStopping(Hook):
    """Ends the run, saved and with exit code 0, when the evaluation loss or a metric has stopped improving."""

    name = "early-stopping"
    Options = EarlyStoppingOptions
    options: EarlyStoppingOptions

    def problems(self, plan: Plan) -> list[Problem]:
        table = plan.tables["evaluation"]
        if table["every_steps"] or table["every_epochs"]:
            return []
        why = f"it needs the evaluation {self.options.metric}; expected [evaluation] every_steps or every_epochs, found none"
        return [Problem(why)]

    def start(self) -> _Watch:
        return _Watch(self.options)


class _Watch:
    """The best value so far, and the evaluations since then. Checkpoints have both, so a resume keeps the count."""

    def __init__(self, options: EarlyStoppingOptions) -> None:
        self._options = options
        self._best, self._since = math.inf if options.mode == "min" else -math.inf, 0

    @hookimpl
    def hpctrain_state(self) -> PluginState:
        return PluginState(
            "early-stopping", values=lambda: {"best": self._best, "since": self._since}, restore=self._restore
        )

    def _restore(self, values: dict[str, Any]) -> None:
        self._best, self._since = float(values["best"]), int(values["since"])

    @hookimpl
    def hpctrain_job_start(self, control: Control) -> None:
        self._stop_if_due(control)  # an ended run must not continue after a resume

    @hookimpl
    def hpctrain_measured(self, names: Sequence[str]) -> None:
        if self._options.metric not in names:
            raise UsageError(
                f"[[hook]] early-stopping: evaluations measure {', '.join(names)}, and not {self._options.metric!r}"
            )

    @hookimpl
    def hpctrain_evaluation(self, metrics: dict[str, Any], control: Control) -> None:
        options, value = self._options, metrics.get(f"evaluation_{self._options.metric}")
        if value is None:
            measured = [name.removeprefix("evaluation_") for name in metrics if name.startswith("evaluation_")]
            self.hpctrain_measured([name for name in measured if name not in ("tokens", "samples")])
            return
        gain = self._best - value if options.mode == "min" else value - self._best
        if gain > options.minimum_change:
            self._best, self._since = value, 0
        else:  # also for NaN
            self._since += 1
        self._stop_if_due(control)

    def _stop_if_due(self, control: Control) -> None:
        if self._since >= self._options.patience:
            options = self._options
            by = f" by more than {options.minimum_change:g}" if options.minimum_change else ""
            moved = f"fallen{by} below" if options.mode == "min" else f"risen{by} above"
            control.stop(
                f"the evaluation {options.metric} has not {moved} {self._best:.4f} for {self._since} evaluations"
            )


@hookimpl
def hpctrain_hook() -> list[type[Hook]]:
    return [EarlyStopping]
