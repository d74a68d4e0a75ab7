"""Habits of programs of one process, and of other trainers, which break a promise here. Written without a look at the kit."""

from __future__ import annotations

import itertools
import os
import time

import torch
import torch.distributed as dist
from hpctrain_plugins.checkpoint.hdf5 import Hdf5, Hdf5Writer
from hpctrain_plugins.model.gpt import GPT
from hpctrain_plugins.precision.floating import FP32
from hpctrain_plugins.sharding.zero0 import Zero0, Zero0Model
from hpctrain_plugins.sharding.zero1 import Zero1, Zero1Model
from torch.utils.checkpoint import checkpoint as recompute

from faulty.around_steps import _Hook, _Metric
from faulty.fault import of_slot, planted
from faulty.model_and_data import _Altered, _Changed
from faulty.steps import _SGD, _Optimizer
from hpctrain.api import (
    ActivationCheckpointing,
    LossScaler,
    PluginState,
    RunningMetric,
    Schedule,
    State,
    hookimpl,
)

# optimizer

optimizer = lambda told: planted("optimizer", "name", told, optimizer={"lr": 0.05})  # noqa: E731


def _all(optimizer):
    return [(group, p) for group in optimizer.param_groups for p in group["params"]]


@optimizer("trains as one process does|needs a whole parameter")
class ClipsByRank(_Optimizer):
    """It clips by the norm of what it holds."""

    class made(_SGD):  # noqa: N801
        @torch.no_grad()
        def step(self, closure=None):
            norm = torch.stack([p.grad.norm() for _, p in _all(self)]).norm()
            for group, p in _all(self):
                p -= group["lr"] * p.grad * 0.05 / max(0.05, float(norm))


@optimizer("updates each element by itself")
class SkipsZeros(_Optimizer):
    """It leaves tensors alone, momentum and decay too, whose gradient is zero: a part may be, where the whole is not."""

    class made(_SGD):  # noqa: N801
        @torch.no_grad()
        def step(self, closure=None):
            for group, p in _all(self):
                if p.grad.any():
                    kept = self.state[p].setdefault("mean", torch.zeros_like(p))
                    kept.mul_(0.9).add_(p.grad)
                    p.mul_(0.9).sub_(kept, alpha=group["lr"])


@optimizer("updates alike from the same values")
class CountsForAll(_Optimizer):
    """Its number of steps belongs to the class."""

    class made(_SGD):  # noqa: N801
        steps = itertools.count(1)

        @torch.no_grad()
        def step(self, closure=None):
            count = next(self.steps)
            for group, p in _all(self):
                p -= group["lr"] / (1 + 0.5 * count) * p.grad


@optimizer("goes on after a resume|makes another step after its state")
class WarmsUpByCalls(_Optimizer):
    class made(_SGD):  # noqa: N801
        calls = 0

        @torch.no_grad()
        def step(self, closure=None):
            self.calls += 1
            for group, p in _all(self):
                p -= group["lr"] * min(1.0, self.calls / 6) * p.grad


@optimizer("replicas hold the same|trains as one process does|left other")
class NoiseByRank(_Optimizer):
    class made(_SGD):  # noqa: N801
        @torch.no_grad()
        def step(self, closure=None):
            noise = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")) + os.getpid())
            for group, p in _all(self):
                p -= group["lr"] * (p.grad + 0.01 * torch.randn(p.shape, generator=noise))


@optimizer("goes back to a checkpoint|makes another step after its state")
class LooksAhead(_Optimizer):
    """It keeps slow weights beside its state, made anew where there are none."""

    class made(_SGD):  # noqa: N801
        slow: dict = {}  # noqa: RUF012

        @torch.no_grad()
        def step(self, closure=None):
            super().step()
            for _, p in _all(self):
                kept = self.slow.setdefault(p, p.clone())
                kept.lerp_(p, 0.5)
                p.copy_(kept)


# schedule

schedule = lambda told: planted("schedule", "name", told)  # noqa: E731


@schedule("is a pure function of the step|trains|goes on")
class ByTime(Schedule):
    def factor(self, step, steps):
        return 1 / (1 + time.time() % 1)


@schedule("is a pure function of the step|trains|goes on|ranks")
class ByRank(Schedule):
    def factor(self, step, steps):
        return 1.0 if not dist.is_initialized() or dist.get_rank() == 0 else 0.5


@schedule("is a pure function of the step|trains|goes on")
class Drawn(Schedule):
    def factor(self, step, steps):
        return float(torch.rand(())) + 0.5


# hook

hook = lambda told, ranks=1: planted("hook", "name", told, ranks)  # noqa: E731


def _decay(model, share):
    with torch.no_grad():
        for piece in model.pieces:
            piece.tensor.mul_(share)
    model.refresh()


@hook("goes on after a resume|goes back to a checkpoint")
class CountsUntilAResume(_Hook):
    class made:  # noqa: N801
        count = 0

        @hookimpl
        def hpctrain_step_end(self, model):
            self.count += 1
            _decay(model, 1 - 0.01 * self.count)


@hook("goes back to a checkpoint")
class CountsThroughARollback(_Hook):
    """It takes back its count once only, at a resume."""

    class made:  # noqa: N801
        count = 0

        @hookimpl
        def hpctrain_state(self):
            return PluginState("counts", values=lambda: {"count": self.count}, restore=self.restore)

        def restore(self, values):
            if self.count == 0:
                self.count = values["count"]

        @hookimpl
        def hpctrain_step_end(self, model):
            self.count += 1
            _decay(model, 1 - 0.01 * self.count)


@hook("replicas|trains as one process does", 2)
class NoiseOnWeights(_Hook):
    class made:  # noqa: N801
        @hookimpl
        def hpctrain_step_end(self, model):
            noise = torch.Generator().manual_seed(dist.get_rank())
            with torch.no_grad():
                for piece in model.pieces:
                    piece.tensor.add_(1e-2 * torch.randn(piece.tensor.shape, generator=noise).to(piece.tensor))
            model.refresh()


@hook("leaves torch.s settings alone")
class WidensTheDefault(_Hook):
    class made:  # noqa: N801
        @hookimpl
        def hpctrain_step_end(self, step):
            torch.set_default_dtype(torch.float64)


@hook("leaves the model in training mode")
class LeavesEvaluation(_Hook):
    class made:  # noqa: N801
        @hookimpl
        def hpctrain_step_end(self, model):
            model.module.eval()


@hook("takes back after an evaluation|replicas|the module has")
class ForgetsToSwapBack(_Hook):
    """It evaluates an average of weights, and trains on with it."""

    class made:  # noqa: N801
        @hookimpl
        def hpctrain_evaluation_start(self, model):
            _decay(model, 0.9)


@hook("trains as one process does|replicas|gradient", 2)
class ActsOnItsOwnLoss(_Hook):
    """A change of weights by the loss of this rank's own samples."""

    class made:  # noqa: N801
        loss = 0.0

        @hookimpl
        def hpctrain_outputs(self, outputs):
            self.loss = float(outputs.float().mean())

        @hookimpl
        def hpctrain_step_end(self, model):
            _decay(model, 1 - 0.1 * abs(self.loss))


# metric

metric = lambda told, ranks=1: planted("metric", "name", told, ranks)  # noqa: E731


@metric("measures alike in other batches|measures as one process does")
class MeanOfBatches(_Metric):
    class made(RunningMetric):  # noqa: N801
        total, batches = 0.0, 0

        def update(self, outputs, target):
            self.total += float(outputs.float().square().mean())
            self.batches += 1

        def compute(self, group):
            sums = torch.tensor([self.total, self.batches])
            dist.all_reduce(sums, group=group)
            return {"mean": float(sums[0] / sums[1])}


@metric("measures as one process does|expected equal values", 2)
class ForgetsTheGroup(_Metric):
    class made(RunningMetric):  # noqa: N801
        total = 0.0

        def update(self, outputs, target):
            self.total += float(outputs.float().square().sum())

        def compute(self, group):
            total = torch.tensor(self.total)
            dist.broadcast(total, 0, group=group)
            return {"sum": float(total)}


# dataset

dataset = lambda told: planted("dataset", "name", told)  # noqa: E731


@dataset("loads the same samples in workers|gave another item")
class ByWorker(_Altered):
    class samples(_Changed):  # noqa: N801
        def __getitem__(self, index):
            worker = torch.utils.data.get_worker_info()
            row = self.samples[index]
            return row if worker is None else {key: (value + 1) % 7 for key, value in row.items()}


@dataset("trains as one process does|gave another item|differ")
class ItemsByRank(_Altered):
    class samples(_Changed):  # noqa: N801
        def __getitem__(self, index):
            shift = dist.get_rank() if dist.is_initialized() else 0
            return {key: (value + shift) % 7 for key, value in self.samples[index].items()}


@dataset("goes on after a resume|gave another item|trains")
class WearsOut(_Altered):
    """An item changes each time it is read, slowly."""

    class samples(_Changed):  # noqa: N801
        reads = itertools.count()

        def __getitem__(self, index):
            shift = next(self.reads) // 40
            return {key: (value + shift) % 7 for key, value in self.samples[index].items()}


@dataset("trains as one process does|one text for the same samples|length|samples")
class CutByRank(_Altered):
    """Each rank opens its own share, as under DistributedSampler."""

    class samples(_Changed):  # noqa: N801
        def __len__(self):
            ranks = dist.get_world_size() if dist.is_initialized() else 1
            return len(self.samples) // ranks

        def __getitem__(self, index):
            ranks = dist.get_world_size() if dist.is_initialized() else 1
            rank = dist.get_rank() if dist.is_initialized() else 0
            return self.samples[index * ranks + rank]


# model

model = lambda told, ranks=1: planted("model", "name", told, ranks)  # noqa: E731


@model("trains as one process does")
class CentersTheBatch(GPT):
    def forward(self, module, batch):
        logits = super().forward(module, batch)
        return logits - logits.mean(0, keepdim=True)


@model("trains as one process does|goes on after a resume|gave")
class CountsForwards(GPT):
    def forward(self, module, batch):
        module.forwards = getattr(module, "forwards", 0) + 1
        return super().forward(module, batch) / (1 + 0.1 * module.forwards)


@model("trains as one process does|goes on after a resume")
class KeepsTheFirstBatch(GPT):
    """A mask that it makes of its first batch."""

    def forward(self, module, batch):
        if not hasattr(module, "first"):
            module.first = float(batch["input_ids"].float().mean()) / 61
        return super().forward(module, batch) * module.first


@model("trains as one process does", 2)
class DropsByRank(GPT):
    def forward(self, module, batch):
        rank = dist.get_rank() if dist.is_initialized() else 0
        drawn = torch.Generator().manual_seed(rank)
        logits = super().forward(module, batch)
        return logits * (torch.rand(logits.shape[-1], generator=drawn) > 0.1)


@model("trains as one process does|replicas|buffer|evaluation", 2)
class RunningMeanByRank(GPT):
    def build(self):
        module = super().build()
        module.register_buffer("running", torch.zeros(()))
        return module

    def initialize(self, name, tensor, rows, seed):
        if name == "running":
            tensor.zero_()
        else:
            super().initialize(name, tensor, rows, seed)

    def forward(self, module, batch):
        logits = super().forward(module, batch)
        if module.training:
            module.running.lerp_(logits.detach().mean(), 0.5)
        return logits * (1 + module.running)


@model("trains as one process does|before the first step")
class ScalesByRanks(GPT):
    """The loss is divided by the number of ranks, as under other trainers."""

    def loss(self, outputs, batch):
        return super().loss(outputs, batch) / (dist.get_world_size() if dist.is_initialized() else 1)


# sharding

sharding = lambda told, ranks=1: planted("sharding", "name", told, ranks)  # noqa: E731


@sharding("trains as one process does")
class SumsEachBackward(Zero0):
    """It sums over the ranks in each backward what the ones before have summed already."""

    class made(Zero0Model):  # noqa: N801
        def begin(self, last, interleaved=False):
            super().begin(True, interleaved)

    def shard(self, module, spec, mesh, sums):
        return self.made(module, sums, self.options)


@sharding("trains as one process does|goes on after a resume|goes back|the values of the pieces")
class UpdatesLate(Zero1):
    """The module gets new values at the begin of the next step, and none where a run resumes."""

    class made(Zero1Model):  # noqa: N801
        is_late = False

        def refresh(self):
            self.is_late = True

        def begin(self, last, interleaved=False):
            if self.is_late:
                super().refresh()
                self.is_late = False
            super().begin(last, interleaved)

    def shard(self, module, spec, mesh, sums):
        return self.made(module, mesh, sums, self.options)


@sharding("trains as one process does|goes on after a resume", 2)
class KeepsItsMean(Zero0):
    """Momentum of its own on gradients, which no checkpoint has."""

    class made(Zero0Model):  # noqa: N801
        def synchronize(self):
            super().synchronize()
            for entry in [entry for bucket in self.buckets for entry in bucket.entries]:
                entry.mean = 0.5 * getattr(entry, "mean", 0) + entry.parameter.grad
                entry.parameter.grad.copy_(entry.mean)

    def shard(self, module, spec, mesh, sums):
        return self.made(module, sums, self.options)


# precision and activation checkpointing

precision = lambda told, ranks=1: planted("precision", "mode", told, ranks)  # noqa: E731


@precision("goes on after a resume|its scaler's state holds all")
class CountsInTheScaler(FP32):
    class scaler(LossScaler):  # noqa: N801
        scale, good = 8.0, 0

        def update(self, finite):
            self.good += 1
            if self.good % 3 == 0:
                self.scale *= 2

        def state(self):
            return {"scale": self.scale}

        def restore(self, state):
            self.scale = state["scale"]

    def start(self):
        return self.scaler()


checkpointing = lambda told: planted("activation_checkpointing", "mode", told)  # noqa: E731


class _Recomputed(ActivationCheckpointing):
    options_of = {}  # noqa: RUF012

    def apply(self, module, spec, replicas):
        for block in spec.blocks(module):
            inner = block.forward
            block.forward = lambda *args, inner=inner, **named: recompute(inner, *args, **self.options_of, **named)


@checkpointing("trains as one process does")
class DrawsAnew(_Recomputed):
    """Dropout of a recomputed block drops others."""

    options_of = {"use_reentrant": False, "preserve_rng_state": False}  # noqa: RUF012


@checkpointing("trains as one process does")
class CutsTheGraph(_Recomputed):
    """A block whose input needs no gradient has none."""

    def apply(self, module, spec, replicas):
        for block in spec.blocks(module):
            inner = block.forward
            block.forward = lambda hidden, *args, inner=inner, **named: inner(hidden.detach(), *args, **named)


# checkpoint

checkpoint = lambda told, **table: planted("checkpoint", "format", told, checkpoint=table)  # noqa: E731


@checkpoint("goes on after a resume|tensors|dtype|keeps|trains as one")
class Narrows(Hdf5):
    """All numbers become 16-bit ones."""

    class made(Hdf5Writer):  # noqa: N801
        def write(self, snapshot, directory, group):
            for piece in snapshot.pieces:
                if piece.tensor.is_floating_point():
                    piece.tensor.copy_(piece.tensor.bfloat16())
            super().write(snapshot, directory, group)

    def writer(self):
        return self.made()


@checkpoint("goes on after a resume|tensors|a snapshot|verify")
class ForgetsBuffers(Hdf5):
    class made(Hdf5Writer):  # noqa: N801
        def write(self, snapshot, directory, group):
            kept = [piece for piece in snapshot.pieces if not piece.name.endswith("seen")]
            super().write(State(kept, snapshot.values), directory, group)

    def writer(self):
        return self.made()


@checkpoint("finds|verify|damage|whole")
class VerifiesNothing(Hdf5):
    def verify(self, directory, progress=None):
        return []


@hookimpl
def hpctrain_optimizer():
    return of_slot("optimizer")


@hookimpl
def hpctrain_schedule():
    return of_slot("schedule")


@hookimpl
def hpctrain_hook():
    return of_slot("hook")


@hookimpl
def hpctrain_metric():
    return of_slot("metric")


@hookimpl
def hpctrain_dataset():
    return of_slot("dataset")


@hookimpl
def hpctrain_model():
    return of_slot("model")


@hookimpl
def hpctrain_sharding():
    return of_slot("sharding")


@hookimpl
def hpctrain_precision():
    return of_slot("precision")


@hookimpl
def hpctrain_activation_checkpointing():
    return of_slot("activation_checkpointing")


@hookimpl
def hpctrain_checkpoint():
    return of_slot("checkpoint")
