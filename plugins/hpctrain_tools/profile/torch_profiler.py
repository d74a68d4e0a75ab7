"""torch.profiler: traces of operators, kernels and phases, of chosen ranks and steps."""

from __future__ import annotations

from math import prod

from hpctrain.api import Plan, Problem, Profiler, hookimpl
from hpctrain_tools.profile.options import TorchProfilerOptions
from hpctrain_tools.profile.windows import Profiling


class TorchProfiler(Profiler):
    """Records windows of steps: a Chrome trace of each chosen rank in OUTPUT_DIR/profile, gathered by rank 0."""

    name = "torch"
    Options = TorchProfilerOptions
    options: TorchProfilerOptions

    def problems(self, plan: Plan) -> list[Problem]:
        refused = None if plan.axes is None else self.options.refusal(prod(plan.axes.values()))
        return [] if refused is None else [Problem(refused, "profile.ranks")]

    def start(self) -> Profiling:
        return Profiling(self.options)


@hookimpl
def hpctrain_profile() -> list[type[Profiler]]:
    return [TorchProfiler]
