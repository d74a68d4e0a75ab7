"""Hooks, metrics, loggers and schedulers that break a promise."""

from __future__ import annotations

import torch
import torch.distributed as dist

from faulty.fault import of_slot, planted
from hpctrain.api import (
    Hook,
    JobState,
    Logger,
    LogWriter,
    Metric,
    Profiler,
    RunningMetric,
    Scheduler,
    hookimpl,
)

# hook, metric, logger

hook = lambda told, ranks=1: planted("hook", "name", told, ranks)  # noqa: E731


class _Hook(Hook):
    def start(self):
        return self.made()


@hook("the module has the values of the pieces: .* it left|replicas of .* differ")
class ChangesWeights(_Hook):
    class made:  # noqa: N801
        @hookimpl
        def hpctrain_step_end(self, model):
            with torch.no_grad():
                model.pieces[0].tensor.mul_(0.5)


@hook("takes back after an evaluation what it changed")
class ChangesTheModule(_Hook):
    class made:  # noqa: N801
        @hookimpl
        def hpctrain_evaluation_start(self, model):
            with torch.no_grad():
                next(iter(model.module.parameters())).mul_(0.5)


@hook(r"leaves torch.s settings alone: .*set_grad_enabled\(False\)")
class TurnsGradientsOff(_Hook):
    class made:  # noqa: N801
        @hookimpl
        def hpctrain_step_end(self, step):
            torch.set_grad_enabled(False)


@hook("looks at outputs and batches: it changed")
class ChangesOutputs(_Hook):
    class made:  # noqa: N801
        @hookimpl
        def hpctrain_outputs(self, outputs):
            outputs.detach().mul_(2)


@hook("started with hpctrain_job_end on rank 1 and hpctrain_step_end on rank 0", 2)
class HooksByRank(Hook):
    class first:  # noqa: N801
        @hookimpl
        def hpctrain_step_end(self): ...

    class others:  # noqa: N801
        @hookimpl
        def hpctrain_job_end(self): ...

    def start(self):
        return self.others() if dist.get_rank() else self.first()


metric = lambda told, ranks=1: planted("metric", "name", told, ranks)  # noqa: E731


class _Metric(Metric):
    def start(self):
        return self.made()


@metric("looks at outputs and batches")
class ChangingMetric(_Metric):
    class made(RunningMetric):  # noqa: N801
        def update(self, outputs, target):
            outputs.mul_(2)

        def compute(self, group):
            return {"one": 1.0}


@metric("computed .* on one rank and .* on another, expected equal values: sum over the group", 2)
class MetricOfARank(_Metric):
    class made(RunningMetric):  # noqa: N801
        def update(self, outputs, target): ...

        def compute(self, group):
            return {"rank": float(dist.get_rank())}


@metric("measures alike in other batches")
class MetricThatGoesOn(_Metric):
    def start(self):
        return self.only

    class made(RunningMetric):  # noqa: N801
        seen = 0.0

        def update(self, outputs, target):
            self.seen += float(len(target))

        def compute(self, group):
            return {"seen": self.seen}

    only = made()


# logger: what it does to a row stays its own


class ChangesRows(Logger):
    name = "changes-rows"

    class writer(LogWriter):  # noqa: N801
        def log(self, row):
            row["loss"] = -1.0
            row.get("memory_bytes", {}).clear()

    def open(self, output_dir, resumed_step):
        return self.writer()


class OpensNothing(Logger):
    name = "opens-nothing"

    def open(self, output_dir, resumed_step):
        return None


# profile


@planted(
    "profile",
    "name",
    "costs a step nothing where nothing is recorded: .* returns hpctrain_phase_begin, hpctrain_step_end",
)
class CountsEachStep(Profiler):
    """Counts steps that nobody records."""

    class made:  # noqa: N801
        @hookimpl
        def hpctrain_request(self): ...

        @hookimpl
        def hpctrain_phase_begin(self): ...

        @hookimpl
        def hpctrain_step_end(self): ...

    def start(self):
        return self.made()


# scheduler


class _Scheduler(Scheduler):
    def render(self, launch):
        return "#!/bin/sh"

    def submit(self, script, launch):
        return ["7"]

    def state(self, id):
        return JobState("done")

    def cancel(self, id, directory): ...


scheduler = lambda told: planted("scheduler", "name", told)  # noqa: E731


@scheduler("renders the text of a script: rendered bytes")
class RendersBytes(_Scheduler):
    def render(self, launch):
        return b"#!/bin/sh"


@scheduler("gives a state that hpctrain knows: gave .*COMPLETED")
class StateOfItsOwn(_Scheduler):
    def state(self, id):
        return JobState("COMPLETED")


@hookimpl
def hpctrain_hook():
    return of_slot("hook")


@hookimpl
def hpctrain_profile():
    return of_slot("profile")


@hookimpl
def hpctrain_metric():
    return of_slot("metric")


@hookimpl
def hpctrain_logger():
    return [ChangesRows, OpensNothing]


@hookimpl
def hpctrain_scheduler():
    return of_slot("scheduler")
