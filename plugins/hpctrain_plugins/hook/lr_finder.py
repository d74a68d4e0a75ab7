"""The learning-rate range test (Smith, "Cyclical Learning Rates for Training Neural Networks", 2017): lr rises from step to
step until the loss diverges."""

from __future__ import annotations

import math
from typing import Any

from hpctrain.api import Control, Field, Hook, Identity, LiveModel, Options, Plan, Problem, hookimpl

# the share of the average of the losses that remains at each step
_SMOOTHING = 0.9
# the test is over when the averaged loss is this many times its lowest value
_DIVERGED = 4.0


class LrFinderOptions(Options):
    lowest: float = Field(default=1e-7, gt=0, description="lr of the first step")
    highest: float = Field(default=10.0, gt=0, description="lr of the last step")
    steps: int = Field(default=100, ge=10, description="steps from one to the other")


class LrFinder(Hook):
    """Raises lr from step to step, and ends the run with the lr at which the loss fell fastest."""

    name = "lr-finder"
    Options = LrFinderOptions
    options: LrFinderOptions

    def problems(self, plan: Plan) -> list[Problem]:
        options, table, found = self.options, plan.tables["job"], []
        if options.highest <= options.lowest:
            found.append(
                Problem(f"expected highest above lowest, found {options.highest:g} and {options.lowest:g}", "highest")
            )
        if table["steps"] is not None and table["steps"] < options.steps:
            why = f"the test takes {options.steps} steps, but [job] steps is {table['steps']}; raise [job] steps or lower steps"
            found.append(Problem(why, "steps"))
        reaction = plan.tables["guard"]["non_finite"]
        if reaction != "skip":
            why = f'the last steps may overflow; expected [guard] non_finite = "skip", found "{reaction}"'
            found.append(Problem(why))
        return found

    def start(self) -> _Test:
        return _Test(self.options)


class _Test:
    def __init__(self, options: LrFinderOptions) -> None:
        self._options = options
        # lr of each group as the job has it; the test keeps their ratios
        self._rates: list[float] = []
        self._average = 0.0
        # lr and the averaged loss before its update
        self._curve: list[tuple[float, float]] = []
        self._has_told, self._speaks = False, False

    @hookimpl
    def hpctrain_job_start(self, model: LiveModel, identity: Identity, step: int, control: Control) -> None:
        self._speaks = identity.rank == 0
        self._model, self._rates = model, [group["lr"] for group in model.optimizer.param_groups]
        if step:
            control.stop(f"lr-finder needs a new run, found one of {step} steps; use another [job] name")

    def _lr(self, step: int) -> float:
        options = self._options
        return float(options.lowest * (options.highest / options.lowest) ** (step / (options.steps - 1)))

    @hookimpl
    def hpctrain_phase_begin(self, phase: str, step: int) -> None:
        if phase == "optimizer":
            for group, rate in zip(self._model.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = self._lr(step) * rate / self._rates[0]

    @hookimpl
    def hpctrain_step_end(self, step: int, metrics: dict[str, Any], control: Control) -> None:
        metrics["lr"], loss = self._lr(step - 1), metrics["loss"]
        if math.isfinite(loss):
            self._average = _SMOOTHING * self._average + (1 - _SMOOTHING) * loss
            self._curve.append((metrics["lr"], self._average / (1 - _SMOOTHING**step)))
        lowest = min((one for _, one in self._curve), default=math.inf)
        diverged = not math.isfinite(loss) or self._curve[-1][1] > _DIVERGED * lowest
        if diverged or step == self._options.steps:
            self._has_told = True
            control.stop(self._verdict(metrics["lr"] if diverged else None))

    @hookimpl
    def hpctrain_job_end(self) -> None:
        if self._speaks and self._curve and not self._has_told:
            taken, wanted = len(self._curve), self._options.steps
            print(f"{self._verdict(None)}; the job ended after {taken} of the test's {wanted} steps", flush=True)

    def _verdict(self, diverged_at: float | None) -> str:
        ended = "the loss did not diverge" if diverged_at is None else f"the loss diverged at lr {diverged_at:.2g}"
        falls = [
            ((before[1] - after[1]) / math.log(after[0] / before[0]), after[0])
            for before, after in zip(self._curve, self._curve[1:], strict=False)
        ]
        steepest = max(falls, default=(0.0, 0.0))
        if steepest[0] <= 0:
            return f"lr-finder: the loss never fell, and {ended}; try a smaller lowest"
        return f"lr-finder: the loss fell fastest at lr {steepest[1]:.2g}, and {ended}"


@hookimpl
def hpctrain_hook() -> list[type[Hook]]:
    return [LrFinder]
