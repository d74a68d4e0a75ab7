"""Checkpoint formats, hooks, metrics, loggers and schedulers that break a promise."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hpctrain_plugins.checkpoint.hdf5 import Hdf5, Hdf5Writer

from faulty.fault import planted
from hpctrain.api import (
    Hook,
    JobState,
    Logger,
    LogWriter,
    Metric,
    RunningMetric,
    Scheduler,
    State,
    hookimpl,
)

# checkpoint

checkpoint = lambda told, **table: planted("checkpoint", "format", told, checkpoint=table)  # noqa: E731


@checkpoint("read .* of its first checkpoint with other values, expected those that were written")
class ReadsZeros(Hdf5):
    def load(self, directory, pieces):
        super().load(directory, pieces)
        for piece in pieces:
            piece.tensor.zero_()


@checkpoint("read the value 'samples_seen' of its first checkpoint as None")
class LosesAValue(Hdf5):
    def read_values(self, directory):
        return {key: value for key, value in super().read_values(directory).items() if key != "samples_seen"}


@checkpoint("does not recognize its own checkpoint")
class RecognizesNothing(Hdf5):
    def recognizes(self, directory):
        return False


@checkpoint("lists model/.* of its first checkpoint with the shape None")
class ListsNoModel(Hdf5):
    def names(self, directory):
        return {name: shape for name, shape in super().names(directory).items() if not name.startswith("model/")}


@checkpoint("gave a snapshot whose .* is the live tensor", asynchronous=True, every_steps=1)
class LiveSnapshot(Hdf5):
    class made(Hdf5Writer):  # noqa: N801
        def snapshot(self, state):
            return State(state.pieces, state.values)

    def writer(self):
        return self.made()


# hook, metric, logger

hook = lambda told, ranks=1: planted("hook", "name", told, ranks)  # noqa: E731


class _Hook(Hook):
    def start(self):
        return self.made()


@hook("changed weights of the model in hpctrain_step_end")
class ChangesWeights(_Hook):
    class made:  # noqa: N801
        @hookimpl
        def hpctrain_step_end(self, model):
            with torch.no_grad():
                model.pieces[0].tensor.mul_(0.5)


@hook("changed weights of the model in hpctrain_evaluation_start")
class ChangesTheModule(_Hook):
    class made:  # noqa: N801
        @hookimpl
        def hpctrain_evaluation_start(self, model):
            with torch.no_grad():
                next(iter(model.module.parameters())).mul_(0.5)


@hook(r"torch.set_grad_enabled\(False\) was called before the forward")
class TurnsGradientsOff(_Hook):
    class made:  # noqa: N801
        @hookimpl
        def hpctrain_step_end(self, step):
            torch.set_grad_enabled(False)


@hook("changed the model's outputs or the batch in place")
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


@metric("changed the model's outputs or the batch in place")
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


@metric("gives the object of the evaluation before in `start`, which goes on with its sums")
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


# scheduler


class _Scheduler(Scheduler):
    def render(self, launch):
        return "#!/bin/sh"

    def submit(self, script, launch):
        return ["7"]

    def state(self, id):
        return JobState("done")

    def cancel(self, id, directory): ...


class RendersBytes(_Scheduler):
    name, told = "renders-bytes", r"rendered .*, expected the text of a script"

    def render(self, launch):
        return b"#!/bin/sh"


class StateOfItsOwn(_Scheduler):
    name, told = "state-of-its-own", r"gave the state .*, expected a JobState whose word is one of pending, running"

    def state(self, id):
        return JobState("COMPLETED")


SCHEDULERS = [RendersBytes, StateOfItsOwn]
