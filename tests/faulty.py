"""Plugins of every slot, each of which breaks one promise of its contract; FAULTS says which, and what a run must say."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from hpctrain_plugins.checkpoint.hdf5 import Hdf5, Hdf5Writer
from hpctrain_plugins.dataset.synthetic import Synthetic
from hpctrain_plugins.model.gpt import GPT
from hpctrain_plugins.precision.floating import FP32
from hpctrain_plugins.sharding.zero0 import Zero0, Zero0Model
from hpctrain_plugins.sharding.zero1 import Zero1, Zero1Model
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from hpctrain.api import (
    ActivationCheckpointing,
    AppliedAxis,
    AxisTraits,
    Communicator,
    CompressionOptions,
    Compressor,
    Hook,
    JobState,
    Launcher,
    Logger,
    LogWriter,
    LossScaler,
    LossyCompression,
    Metric,
    Optimizer,
    OptimizerOptions,
    Parallelism,
    PipelineSchedule,
    RunningMetric,
    Samples,
    Schedule,
    State,
    hookimpl,
)
from hpctrain.torch_private import WrappingGroup, make_group


@dataclass(frozen=True)
class Fault:
    """A promise that a plugin breaks.

    tables: of the job, besides those of the test. told: what is said, a regular expression. ranks: the fewest that show it.
    """

    plugin: type
    tables: Mapping[str, Any]
    told: str
    ranks: int = 1

    def __str__(self) -> str:
        return self.plugin.__name__

    def tables_over(self, job: dict[str, Any]) -> dict[str, Any]:
        """The tables of `job` with the plugin, in micro batches of three samples, and with evaluations."""
        tables = {**job, "evaluation": {"every_steps": 2}, "plugins": {"load": ["faulty"]}}
        tables["batch"] = {**tables["batch"], "micro_size": 3}
        for slot, table in self.tables.items():
            tables[slot] = {**tables.get(slot, {}), **table} if isinstance(table, dict) else table
        return tables


FAULTS: list[Fault] = []
_NAMES = itertools.count()


def planted(slot: str, key: str, told: str, ranks: int = 1, **tables: Any) -> Any:
    """Register the class that follows as a plugin of `slot`, which `key` of its table chooses."""

    def register(cls: Any) -> Any:
        cls.name, cls.slot = f"faulty-{next(_NAMES)}", slot
        table: Any = {cls.name: 2} if slot == "parallelism" else {key: cls.name, **tables.get(slot, {})}
        of_job = {"parallelism": {"pipeline": {"size": 2, **table}}} if slot == "pipeline_schedule" else {slot: table}
        FAULTS.append(Fault(cls, {slot: [table]} if slot in ("hook", "metric") else of_job, told, ranks))
        return cls

    return register


def of_slot(slot: str) -> list[type]:
    return [one.plugin for one in FAULTS if one.plugin.slot == slot]


# --- model

model = lambda told, ranks=1: planted("model", "name", told, ranks)  # noqa: E731


@model("has the loss .* for a sample and .* for it twice: a mean")
class MeanLoss(GPT):
    def loss(self, outputs, batch):
        return super().loss(outputs, batch) / self.count(batch)


@model("its loss has the shape .*, expected a scalar: the sum over what `count` counts")
class LossOfEachToken(GPT):
    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten(), reduction="none")


@model("its loss has no gradient")
class LossWithoutGraph(GPT):
    def loss(self, outputs, batch):
        return super().loss(outputs.detach(), batch)


@model("counted .* tokens in a micro batch, expected a whole number")
class HalfCount(GPT):
    def count(self, batch):
        return super().count(batch) / 2 + 0.25


@model(
    "gave the rows 0 to .* other initial values together than one by one, expected values that follow from seed, name and row"
)
class ValuesByCall(GPT):
    def initialize(self, name, tensor, rows, seed):
        tensor.normal_(std=0.02)


@model("gave a block that is no part of the module")
class OtherBlocks(GPT):
    def blocks(self, module):
        return [nn.Linear(2, 2)]


@model("built another model on rank 1: .*, where rank 0 has ", 2)
class ModelByRank(GPT):
    def build(self):
        module = super().build()
        if dist.get_rank() == 1:
            module.extra = nn.Linear(2, 2)
        return module


# --- dataset


class _Changed(Samples):
    def __init__(self, samples):
        self.samples, self.vocab_size = samples, samples.vocab_size

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]

    def fingerprint(self):
        return self.samples.fingerprint()


class _Altered(Synthetic):
    samples: type = _Changed

    def open(self, split, context):
        found = super().open(split, context)
        return None if found is None else self.samples(found)


dataset = lambda told: planted("dataset", "name", told)  # noqa: E731


@dataset("gave another item .* when it was read again, .*`draws = True`")
class NoisyItems(_Altered):
    class samples(_Changed):  # noqa: N801
        def __getitem__(self, index):
            return {"input_ids": torch.randint(7, (8,)), "labels": torch.randint(7, (8,))}


@dataset("made a batch of .* rows from .* items in its collation")
class DroppedRows(_Altered):
    class samples(_Changed):  # noqa: N801
        def collation(self):
            return lambda items: {key: torch.stack([one[key] for one in items[1:]]) for key in items[0]}


@dataset("gave the fingerprint .*, and another one when it was asked again")
class FingerprintOfTheMoment(_Altered):
    class samples(_Changed):  # noqa: N801
        def fingerprint(self):
            return str(next(_NAMES))


# --- optimizer and schedule


class _SGD(torch.optim.Optimizer):
    def __init__(self, groups, lr=1e-4):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad


class _Optimizer(Optimizer):
    Options = OptimizerOptions
    made = _SGD

    def build(self, groups):
        return self.made(groups)


optimizer = lambda told: planted("optimizer", "name", told, optimizer={"lr": 0.001})  # noqa: E731


@optimizer("built an optimizer whose lr is 0.0001 where its group says 0.001")
class OwnRate(_Optimizer):
    def build(self, groups):
        return _SGD([p for group in groups for p in group["params"]])


@optimizer("built an optimizer of .* tensors, expected each of the .* in `groups` once")
class SomeParameters(_Optimizer):
    def build(self, groups):
        return _SGD([{**group, "params": group["params"][1:]} for group in groups])


@optimizer("changed nothing in two steps on random gradients")
class NoStep(_Optimizer):
    class made(_SGD):  # noqa: N801
        def step(self, closure=None):
            pass


@optimizer("makes another step after its state and its groups' numbers were put into a new optimizer")
class HiddenMomentum(_Optimizer):
    class made(_SGD):  # noqa: N801
        @torch.no_grad()
        def step(self, closure=None):
            self.kept = getattr(self, "kept", {})
            for group in self.param_groups:
                for p in group["params"]:
                    self.kept[p] = 0.9 * self.kept.get(p, 0.0) + p.grad
                    p -= group["lr"] * self.kept[p]


schedule = lambda told: planted("schedule", "name", told)  # noqa: E731


@schedule("gave the factor .* for step 0, and .* before, expected a pure function of the step")
class CountingSchedule(Schedule):
    calls: list[int] = []  # noqa: RUF012

    def factor(self, step, steps):
        self.calls.append(step)
        return 1 / len(self.calls)


@schedule("gave the factor nan for step 0, expected a number")
class NanSchedule(Schedule):
    def factor(self, step, steps):
        return float("nan")


@schedule("gave the factor -0.5 for step 3, expected a number that is zero or more")
class FallingBelowZero(Schedule):
    def factor(self, step, steps):
        return 1 - step / 2


# --- precision and activation checkpointing


class _Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *inputs):
        return self.inner(*inputs)


precision = lambda told: planted("precision", "mode", told)  # noqa: E731


@precision("took away 'head.weight' and added 'head.inner.weight' in convert")
class RenamingPrecision(FP32):
    def convert(self, module):
        module.head = _Wrapped(module.head)


@precision("gave no context manager in forward")
class NoContext(FP32):
    def forward(self, device):
        return None


@precision("scales the loss by 0.0, expected a number above zero")
class ZeroScale(FP32):
    def start(self):
        scaler = LossScaler()
        scaler.scale = 0.0
        return scaler


@precision("has a loss scaler of scale 32, which is 2 once restored from its state")
class ForgottenScale(FP32):
    class scaler(LossScaler):  # noqa: N801
        scale = 2.0

        def update(self, finite):
            self.scale *= 2

    def start(self):
        return self.scaler()


checkpointing = lambda told: planted("activation_checkpointing", "mode", told)  # noqa: E731


@checkpointing("took away 'layers.0.* and added 'layers.0.inner.* in apply")
class RenamingCheckpointing(ActivationCheckpointing):
    def apply(self, module, spec, replicas):
        module.layers[0] = _Wrapped(module.layers[0])


@checkpointing("changed requires_grad of .* in apply, expected True")
class FreezingCheckpointing(ActivationCheckpointing):
    def apply(self, module, spec, replicas):
        spec.blocks(module)[0].requires_grad_(False)


# --- checkpoint

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


# --- hook, metric, logger

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


# --- parallelism

axis = lambda told, ranks=2: planted("parallelism", "size", told, ranks)  # noqa: E731


class _Axis(Parallelism):
    traits = AxisTraits("xp", 45, "the same samples")
    applied = AppliedAxis

    def apply(self, module, spec, mesh):
        return self.applied(module)


@axis("took away 'head.weight' and added 'head.inner.weight' in apply")
class RenamingAxis(_Axis):
    def apply(self, module, spec, mesh):
        module.head = _Wrapped(module.head)
        return AppliedAxis(module)


@axis("gave head.weight the shape .* in apply, expected .* a DTensor with the full shape")
class CutByHand(_Axis):
    def apply(self, module, spec, mesh):
        module.head.weight = nn.Parameter(module.head.weight[: len(module.head.weight) // 2])
        return AppliedAxis(module)


@axis("cut head.weight over the axis xp, whose ranks have parts of samples")
class OwnParametersUntold(_Axis):
    traits = AxisTraits("xp", 45, "parts of samples")

    def apply(self, module, spec, mesh):
        module.head.weight = nn.Parameter(distribute_tensor(module.head.weight, mesh, [Shard(0)]))
        return AppliedAxis(module)


@axis("cut a micro batch that counts .* into parts that count")
class WholeBatchForAll(_Axis):
    traits = AxisTraits("xp", 45, "parts of samples")


@axis("or the ranks of faulty-.* have other samples, which its traits deny")
class OtherSamples(_Axis):
    class applied(AppliedAxis):  # noqa: N801
        def split_batch(self, batch):
            return {key: (value + dist.get_rank()) % 7 for key, value in batch.items()}


# --- sharding

sharding = lambda told, ranks=1: planted("sharding", "name", told, ranks)  # noqa: E731


@sharding("cut 1 ranks into the axes")
class TooManyAxes(Zero0):
    def axes(self, ranks, replicate):
        return {"dp_replicate": ranks, "dp_shard": 2}


class _Zero0(Zero0):
    made = Zero0Model

    def shard(self, module, spec, mesh, sums):
        return self.made(module, sums, self.options)


@sharding("gave pieces with .* elements of ")
class MissingPiece(_Zero0):
    class made(Zero0Model):  # noqa: N801
        def pieces(self):
            return super().pieces()[1:]


@sharding("left a piece of .* without a gradient after `synchronize`")
class MissingGradient(_Zero0):
    class made(Zero0Model):  # noqa: N801
        def synchronize(self):
            super().synchronize()
            self.pieces()[0].tensor.grad = None


@sharding("gave pieces with some elements twice and others never among the .* elements of ", 2)
class OverlappingPieces(Zero1):
    class made(Zero1Model):  # noqa: N801
        def pieces(self):
            return [replace(one, offsets=(0,) * len(one.shape)) for one in super().pieces()]

    def shard(self, module, spec, mesh, sums):
        return self.made(module, mesh, sums, self.options)


@sharding("left other gradients on each rank, whose norms are", 2)
class NoSum(_Zero0):
    class made(Zero0Model):  # noqa: N801
        def reduce(self, bucket):
            bucket.fill_all()


@sharding("left gradients of .* whose norm is .*, expected .*, the norm of the sum over the data-parallel ranks", 2)
class MeanOfGradients(_Zero0):
    class made(Zero0Model):  # noqa: N801
        def synchronize(self):
            super().synchronize()
            for bucket in self.buckets:
                bucket.gradients /= dist.get_world_size()


@sharding("left .* parameters in the module with other values than their pieces have after a step and `refresh`", 2)
class NoRefresh(Zero1):
    class made(Zero1Model):  # noqa: N801
        def refresh(self): ...

    def shard(self, module, spec, mesh, sums):
        return self.made(module, mesh, sums, self.options)


# --- compression

compression = lambda told: planted("compression", "name", told, 2, compression={"inside_nodes": True})  # noqa: E731


class _Compression(LossyCompression):
    Options = CompressionOptions

    def compressor(self, bucket, group):
        return self.made(bucket, group)


class _Sum(Compressor):
    def all_reduce(self, gradients, scale):
        dist.all_reduce(gradients, group=self.group)


@compression("gave another sum for the same gradients after its state.. was put back")
class HiddenResidual(_Compression):
    class made(_Sum):  # noqa: N801
        def all_reduce(self, gradients, scale):
            gradients += getattr(self, "kept", 0)
            sent = gradients.bfloat16()
            self.kept = gradients - sent
            gradients.copy_(sent)
            super().all_reduce(gradients, scale)


@compression("gave 1.00 times the gradients that .* ranks had alike, expected their sum")
class MeanCompression(_Compression):
    class made(_Sum):  # noqa: N801
        def all_reduce(self, gradients, scale):
            super().all_reduce(gradients, scale)
            gradients /= self.group.size()


@compression("left sums that differ between ranks")
class SumOfOneRank(_Compression):
    class made(_Sum):  # noqa: N801
        def all_reduce(self, gradients, scale):
            super().all_reduce(gradients, scale)
            gradients += 1e-3 * dist.get_rank()


@compression("gave a finite sum where a rank's gradient was infinite")
class SwallowsInfinity(_Compression):
    class made(_Sum):  # noqa: N801
        def all_reduce(self, gradients, scale):
            super().all_reduce(gradients.nan_to_num_(posinf=0, neginf=0), scale)


# --- pipeline schedule

pipeline_schedule = lambda told: planted("pipeline_schedule", "schedule", told, 2)  # noqa: E731


class _Schedule(PipelineSchedule):
    def torch_class(self):
        from torch.distributed.pipelining import ScheduleGPipe

        return ScheduleGPipe


@pipeline_schedule(r"its rank_of places 2 stages on the ranks \[0, 2\], expected 1 on each rank from 0 to 1")
class StageOfNoRank(_Schedule):
    def rank_of(self, stage, ranks):
        return 2 * stage


@pipeline_schedule(r"ScheduleGPipe places the stages on the ranks \[0, 1\], and rank_of on \[1, 0\]; expected the same")
class OtherPlacement(_Schedule):
    def rank_of(self, stage, ranks):
        return ranks - 1 - stage


# --- communicator: the backend is registered under the plugin's name


class _Communicator(Communicator):
    def backend(self):
        return self.name

    def device(self, identity):
        return torch.device("cpu")


class _Over(WrappingGroup):
    """The operations of gloo, of which one is wrong."""

    @property
    def group_name(self):
        return self.inner.group_name

    def shutdown(self):
        self.inner.shutdown()

    def allreduce(self, tensors, options):
        return self.inner.allreduce(tensors, options)

    def broadcast(self, tensors, options):
        return self.inner.broadcast(tensors, options)

    def all_gather_single(self, output, source, options):
        return self.inner.all_gather_single(output, source, options)

    def reduce_scatter_single(self, output, source, options):
        return self.inner.reduce_scatter_single(output, source, options)


class MeanOfRanks(_Communicator):
    name, told = "mean-of-ranks", "has a backend whose all_reduce gave"

    class group(_Over):  # noqa: N801
        def allreduce(self, tensors, options):
            work = self.inner.allreduce(tensors, options)
            work.wait()
            for one in tensors:
                one /= self.size()
            return work


class BroadcastOfRank0(_Communicator):
    name, told = "broadcast-of-rank-0", "has a backend whose broadcast gave"

    class group(_Over):  # noqa: N801
        def broadcast(self, tensors, options):
            options.rootRank = 0
            return self.inner.broadcast(tensors, options)


COMMUNICATORS = [MeanOfRanks, BroadcastOfRank0]


def register(plugin: Any) -> str:
    """Register the plugin's backend; returns its name."""

    def create(options, _):
        return plugin.group(make_group("gloo", options, None))

    if plugin.name not in dist.Backend.backend_list:
        dist.Backend.register_backend(plugin.name, create, extended_api=True, devices=["cpu"])
    return plugin.name


# --- logger: what it does to a row stays its own


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


# --- launcher


class _Launcher(Launcher):
    def render(self, launch):
        return "#!/bin/sh"

    def submit(self, script, launch):
        return ["7"]

    def state(self, id):
        return JobState("done")

    def cancel(self, id): ...


class RendersBytes(_Launcher):
    name, told = "renders-bytes", r"rendered .*, expected the text of a script"

    def render(self, launch):
        return b"#!/bin/sh"


class StateOfItsOwn(_Launcher):
    name, told = "state-of-its-own", r"gave the state .*, expected a JobState whose word is one of pending, running"

    def state(self, id):
        return JobState("COMPLETED")


LAUNCHERS = [RendersBytes, StateOfItsOwn]


@hookimpl
def hpctrain_model():
    return of_slot("model")


@hookimpl
def hpctrain_dataset():
    return of_slot("dataset")


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
def hpctrain_activation_checkpointing():
    return of_slot("activation_checkpointing")


@hookimpl
def hpctrain_checkpoint():
    return of_slot("checkpoint")


@hookimpl
def hpctrain_hook():
    return of_slot("hook")


@hookimpl
def hpctrain_metric():
    return of_slot("metric")


@hookimpl
def hpctrain_parallelism():
    return of_slot("parallelism")


@hookimpl
def hpctrain_sharding():
    return of_slot("sharding")


@hookimpl
def hpctrain_compression():
    return of_slot("compression")


@hookimpl
def hpctrain_pipeline_schedule():
    return of_slot("pipeline_schedule")


@hookimpl
def hpctrain_logger():
    return [ChangesRows, OpensNothing]


@hookimpl
def hpctrain_launcher():
    return LAUNCHERS
