"""Faults that strangers planted and that the kit did not find at first: what they show is in options, in another process, on a
second axis, in buffers, in draws, in files."""

from __future__ import annotations

import gc
import json
import os
import queue
import shlex
import threading
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from hpctrain_plugins.checkpoint.hdf5 import Hdf5, Hdf5Writer
from hpctrain_plugins.dataset.synthetic import Synthetic
from hpctrain_plugins.model.gpt import GPT
from hpctrain_plugins.precision.floating import FP32
from hpctrain_plugins.schedule.warmup import Cosine
from hpctrain_plugins.sharding.zero0 import Zero0Model
from torch.utils.checkpoint import checkpoint as recompute

from faulty.around_steps import _Hook, _Scheduler
from faulty.between_ranks import _Axis, _Compression, _Sum, _Zero0
from faulty.fault import of_slot, planted
from faulty.steps import _SGD, _Optimizer
from hpctrain.api import (
    ActivationCheckpointing,
    AppliedAxis,
    AxisTraits,
    Communicator,
    Field,
    Logger,
    LogWriter,
    LossScaler,
    OptimizerOptions,
    Options,
    Profiler,
    Residual,
    State,
    gloo_backend,
    hookimpl,
)

# optimizer and schedule

optimizer = lambda told: planted("optimizer", "name", told, optimizer={"lr": 0.05})  # noqa: E731


@optimizer("takes the rate of each group as it is at a step")
class RateOfTheDefaults(_Optimizer):
    class made(_SGD):  # noqa: N801
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p -= self.defaults["lr"] * p.grad

    def build(self, groups):
        return self.made(groups, self.options.lr)


@planted("schedule", "name", "is a pure function of the step: gave .* behind one with other options")
class KeepsFactors(Cosine):
    kept: dict = {}  # noqa: RUF012

    def factor(self, step, steps):
        return self.kept.setdefault((step, steps), super().factor(step, steps))


class DecayOptions(OptimizerOptions):
    decay: float = Field(default=0.1, ge=0, description="decay of the weights, times the rate")


@optimizer("takes the options of each group: decay = ")
class OneDecay(_Optimizer):
    Options = DecayOptions

    def build(self, groups):
        made = _SGD(groups)
        decay = self.options.decay

        def decays(optimizer, *_):
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.data.mul_(1 - group["lr"] * decay)

        made.register_step_pre_hook(decays)
        return made


@planted("schedule", "name", "is a pure function of the step: gave .* behind others of 8")
class FactorsOfTheFirst(Cosine):
    steps = None

    def factor(self, step, steps):
        self.steps = self.steps or steps
        return super().factor(step, self.steps)


# model and dataset


@planted("model", "name", "trains alike in another process, behind another job: .* before the first step")
class ByHash(GPT):
    def initialize(self, name, tensor, rows, seed):
        super().initialize(name, tensor, rows, hash(name) % 1000)


class ShiftedOptions(Synthetic.Options):
    shift: int = Field(default=0, ge=0, description="what is added to each label")


@planted("dataset", "name", "its fingerprint differs where a sample does: with shift = 1")
class OptionUntold(Synthetic):
    Options = ShiftedOptions

    def open(self, split, context):
        source = super().open(split, context)
        item, shift = source.__getitem__, self.options.shift

        class Shifted(type(source)):
            def __getitem__(self, index):
                found = item(index)
                return {**found, "labels": (found["labels"] + shift) % 50}

        shifted = Shifted.__new__(Shifted)
        shifted.__dict__.update(source.__dict__)
        return shifted


# sharding, parallelism, compression, communicator


@planted("sharding", "name", r"trains as one process does: on 4 ranks with \[parallelism\] tensor = 2", 4)
class SumsOverAll(_Zero0):
    class made(Zero0Model):  # noqa: N801
        def reduce(self, bucket):
            bucket.finish = dist.all_reduce(bucket.fill_all(), async_op=True).wait


@planted("parallelism", "size", "tensor = 2 within, .* called different operations", 2)
class SeedsByRank(_Axis):
    traits = AxisTraits("zp", 45, "parts of samples")

    class applied(AppliedAxis):  # noqa: N801
        def split_batch(self, batch):
            return {key: value[dist.get_rank() % 2 :: 2] for key, value in batch.items()}

        @contextmanager
        def context(self):
            torch.manual_seed(dist.get_rank())
            yield


@planted("compression", "name", r"on 2 ranks with \[sharding\] stage = 3|goes by parameter", 2)
class FlatResidual(_Compression):
    """Compression whose unsent part is in no checkpoint where buckets have no spans."""

    class made(_Sum):  # noqa: N801
        def __init__(self, bucket, group):
            super().__init__(bucket, group)
            self.residual = Residual(bucket, group)

        def all_reduce(self, gradients, scale):
            self.residual.add_to(gradients, scale)
            sent = gradients.bfloat16()
            self.residual.flat.copy_(gradients - sent)
            self.residual.unscale(scale)
            gradients.copy_(sent)
            super().all_reduce(gradients, scale)

        def state(self):
            return [self.residual.flat]

        def pieces(self):
            return self.residual.pieces() if self.bucket.told else []

        def consolidate(self):
            if self.bucket.told:
                self.residual.consolidate()


class _Gloo(Communicator):
    def missing(self, machine):
        return None

    def device(self, identity):
        return torch.device("cpu")

    def backend(self):
        return gloo_backend()


@planted("communicator", "name", "give the right numbers: .* elements of float64 gave", 2)
class NarrowSums(_Gloo):
    def backend(self):
        wide = dist.all_reduce

        def narrow(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
            if tensor.dtype != torch.float64 or async_op:
                return wide(tensor, op, group, async_op)
            sent = tensor.float()
            wide(sent, op, group)
            tensor.copy_(sent)
            return None

        dist.all_reduce = narrow
        return super().backend()


# precision, activation checkpointing and checkpoints


@planted("precision", "mode", "its scaler's state holds all that a resume needs")
class ForgetsToCool(FP32):
    class made(LossScaler):  # noqa: N801
        def __init__(self):
            self.scale, self.cool = 1024.0, 0

        @property
        def skips_nonfinite(self):
            return True

        def update(self, finite):
            self.cool = max(0, self.cool - 1) if finite else 3
            self.scale *= 0.5 if not finite else 1.0 if self.cool else 1.01

        def state(self):
            return {"scale": self.scale}

        def restore(self, state):
            self.scale = state["scale"]

    def start(self):
        return self.made()


@planted("activation_checkpointing", "mode", "a model whose forwards change a buffer")
class ChangesBuffersTwice(ActivationCheckpointing):
    def apply(self, module, spec, replicas):
        for block in spec.blocks(module):
            block.forward = partial(recompute, block.forward, use_reentrant=False)


checkpoint = lambda told: planted("checkpoint", "format", told)  # noqa: E731


@checkpoint("a snapshot is a copy: that of save 2")
class CopiesChanged(Hdf5):
    """It copies tensors whose count of changes has moved."""

    class made(Hdf5Writer):  # noqa: N801
        versions: dict = {}  # noqa: RUF012

        def snapshot(self, state):
            if all(self.versions.get(p.name) == p.tensor._version for p in state.pieces) and self.versions:
                return self.kept
            taken = super().snapshot(state)
            self.versions = {p.name: p.tensor._version for p in state.pieces}
            self.kept = State([*taken.pieces], taken.values)
            return self.kept

    def writer(self):
        return self.made()


@checkpoint(r"restores what a plugin has saved: .* in place of|goes on after a resume")
class PlainJSON(Hdf5):
    def read_values(self, directory):
        return json.loads(json.dumps(super().read_values(directory), default=str))


@checkpoint("finds damage: verify found nothing where a file was that doesn't belong")
class KnowsNoStranger(Hdf5):
    def verify(self, directory, progress=None):
        return [one for one in super().verify(directory, progress) if "stranger" not in one]


# hook, logger, profile, scheduler


@planted("hook", "name", "reports the same figures on each layout: .* largest", 2)
class LargestOfItsPieces(_Hook):
    class made:  # noqa: N801
        @hookimpl
        def hpctrain_step_end(self, metrics, model):
            metrics["largest"] = max(float(p.tensor.abs().max()) for p in model.pieces if p.tensor.numel())


class _Lines(LogWriter):
    def __init__(self, path):
        self.file = path.open("a", buffering=1)

    def log(self, row):
        print(json.dumps(row, default=str), file=self.file)

    def close(self):
        self.file.close()


@planted("logger", "name", "forgets the rows behind the step that a run resumes from")
class GoesOn(Logger):
    def open(self, output_dir, resumed_step):
        return _Lines(output_dir / "rows")


@planted("logger", "name", "forgets the rows behind the step that a run resumes from, and no others")
class ComparesTexts(Logger):
    def open(self, output_dir, resumed_step):
        path = output_dir / "rows"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        path.write_text("".join(line for line in lines if str(json.loads(line)["step"]) <= str(resumed_step)))
        return _Lines(path)


@planted("logger", "name", "takes each row: .* lines of .* are missing")
class LosesTheEnd(Logger):
    class made(_Lines):  # noqa: N801
        def __init__(self, path):
            path.unlink(missing_ok=True)
            super().__init__(path)
            self.rows, self.over = queue.Queue(), threading.Event()
            threading.Thread(target=self.work, daemon=True).start()

        def work(self):
            while not self.over.wait(0.01):
                while not self.rows.empty():
                    super().log(self.rows.get())

        def log(self, row):
            self.rows.put(row)

        def close(self):
            self.over.set()

    def open(self, output_dir, resumed_step):
        return self.made(output_dir / "rows")


class WindowOptions(Options):
    record: int = Field(default=0, ge=0, description="steps that are recorded")


class _Profiler(Profiler):
    Options = WindowOptions

    class running:  # noqa: N801
        def __init__(self, window, steps):
            self.window, self.steps = window, steps

        @hookimpl
        def hpctrain_job_start(self, membership):
            if self.steps:
                self.window.membership, self.window.left = membership, self.steps
                membership.join(self.window, after=1)

    def start(self):
        return self.running(self.window(), self.options.record)


@planted("profile", "name", "leaves torch's settings alone: .*set_detect_anomaly")
class LeavesAnomalies(_Profiler):
    class window:  # noqa: N801
        @hookimpl
        def hpctrain_step_end(self):
            torch.autograd.set_detect_anomaly(True)
            self.left -= 1
            if not self.left:
                self.membership.leave(self)


@planted("profile", "name", "leaves the run when its window is over")
class StaysForEver(_Profiler):
    class window:  # noqa: N801
        @hookimpl
        def hpctrain_step_end(self): ...


@planted("profile", "name", "leaves torch's settings alone: .*gc.isenabled")
class CollectsNoMore(_Profiler):
    class window:  # noqa: N801
        @hookimpl
        def hpctrain_step_end(self):
            gc.disable()
            self.left -= 1
            if not self.left:
                self.membership.leave(self)


@planted("profile", "name", "takes requests of its own name only")
class TakesEachRequest(Profiler):
    class made:  # noqa: N801
        @hookimpl
        def hpctrain_request(self, request):
            request.answer({"state": "done"})
            return True

    def start(self):
        return self.made()


scheduler = lambda told: planted("scheduler", "name", told)  # noqa: E731


@scheduler("renders what the launch says")
class KeepsThePath(_Scheduler):
    def render(self, launch):
        path, job = (shlex.quote(str(one)) for one in (os.environ["PATH"], launch.runs[0].job))
        return f"#!/bin/sh\nPATH={path} exec mpiexec hpctrain run {job}"


@scheduler("its script ends with the exit code of the ranks: it ended with 0")
class EndsWithAnEcho(_Scheduler):
    def render(self, launch):
        return f"#!/bin/sh\nmpiexec -n 2 hpctrain run {shlex.quote(str(launch.runs[0].job))}\necho done"


@scheduler("renders a script that the shell reads|starts the ranks with the run's job")
class QuotesNothing(_Scheduler):
    def render(self, launch):
        return f"#!/bin/sh\nmpiexec -n 2 hpctrain run {launch.runs[0].job}"


@hookimpl
def hpctrain_optimizer():
    return of_slot("optimizer")


@hookimpl
def hpctrain_schedule():
    return of_slot("schedule")


@hookimpl
def hpctrain_precision():
    return of_slot("precision")


@hookimpl
def hpctrain_model():
    return of_slot("model")


@hookimpl
def hpctrain_dataset():
    return of_slot("dataset")


@hookimpl
def hpctrain_sharding():
    return of_slot("sharding")


@hookimpl
def hpctrain_parallelism():
    return of_slot("parallelism")


@hookimpl
def hpctrain_compression():
    return of_slot("compression")


@hookimpl
def hpctrain_communicator():
    return of_slot("communicator")


@hookimpl
def hpctrain_activation_checkpointing():
    return of_slot("activation_checkpointing")


@hookimpl
def hpctrain_checkpoint():
    return of_slot("checkpoint")


@hookimpl
def hpctrain_hook():
    return of_slot("hook")


@hookimpl
def hpctrain_logger():
    return of_slot("logger")


@hookimpl
def hpctrain_profile():
    return of_slot("profile")


@hookimpl
def hpctrain_scheduler():
    return of_slot("scheduler")
