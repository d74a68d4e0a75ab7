"""Axes, sharding, compressions, pipeline schedules and communicators that break a promise."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from hpctrain_plugins.sharding.zero0 import Zero0, Zero0Model
from hpctrain_plugins.sharding.zero1 import Zero1, Zero1Model
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from faulty.fault import Wrapped, of_slot, planted
from hpctrain.api import (
    AppliedAxis,
    AxisTraits,
    Communicator,
    CompressionOptions,
    Compressor,
    LossyCompression,
    Parallelism,
    PipelineSchedule,
    hookimpl,
)
from hpctrain.base.torch_groups import PythonGroup, group_around

# parallelism

axis = lambda told, ranks=2: planted("parallelism", "size", told, ranks)  # noqa: E731


class _Axis(Parallelism):
    traits = AxisTraits("xp", 45, "the same samples")
    applied = AppliedAxis

    def apply(self, module, spec, mesh):
        return self.applied(module)


@axis("took away head.weight in apply")
class RenamingAxis(_Axis):
    def apply(self, module, spec, mesh):
        module.head = Wrapped(module.head)
        return AppliedAxis(module)


@axis("gave head.weight the shape .* in apply, expected .* a DTensor with the full shape")
class CutByHand(_Axis):
    def apply(self, module, spec, mesh):
        module.head.weight = nn.Parameter(module.head.weight[: len(module.head.weight) // 2])
        return AppliedAxis(module)


@axis("trains the kit's job: .* called different operations")
class OwnParametersUntold(_Axis):
    traits = AxisTraits("xp", 45, "parts of samples")

    def apply(self, module, spec, mesh):
        module.head.weight = nn.Parameter(distribute_tensor(module.head.weight, mesh, [Shard(0)]))
        return AppliedAxis(module)


@axis("trains as one process does: .* evaluation tokens .* is 124, expected 62")
class WholeBatchForAll(_Axis):
    traits = AxisTraits("xp", 45, "parts of samples")


@axis("or the ranks of faulty-.* have other samples, which its traits deny")
class OtherSamples(_Axis):
    class applied(AppliedAxis):  # noqa: N801
        def split_batch(self, batch):
            return {key: (value + dist.get_rank()) % 7 for key, value in batch.items()}


def cut_head(module, mesh):
    weight = torch.empty(module.head.weight.shape, device="meta")
    module.head.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
    return AppliedAxis(module)


class CutsFirst(_Axis):
    name = "cuts-first"
    traits = AxisTraits("yp", 46, "the same samples")

    def apply(self, module, spec, mesh):
        return cut_head(module, mesh)


class CutsAnew(_Axis):
    name = "cuts-anew"

    def apply(self, module, spec, mesh):
        return cut_head(module, mesh)


# sharding

sharding = lambda told, ranks=1: planted("sharding", "name", told, ranks)  # noqa: E731


@sharding("Mesh should not be bigger than default world size")
class TooManyAxes(Zero0):
    def axes(self, ranks, replicate):
        return {"dp_replicate": ranks, "dp_shard": 2}


class _Zero0(Zero0):
    made = Zero0Model

    def shard(self, module, spec, mesh, sums):
        return self.made(module, sums, self.options)


@sharding("the module has the values of the pieces")
class MissingPiece(_Zero0):
    class made(Zero0Model):  # noqa: N801
        def pieces(self):
            return super().pieces()[1:]


@sharding("trains as one process does: .* the run ended")
class MissingGradient(_Zero0):
    class made(Zero0Model):  # noqa: N801
        def synchronize(self):
            super().synchronize()
            self.pieces()[0].tensor.grad = None


@sharding("the module has the values of the pieces", 2)
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
            if bucket.gradients is not None:
                bucket.fill_all()


@sharding("trains as one process does: on 2 ranks, the norm of the gradients at step 1", 2)
class MeanOfGradients(_Zero0):
    class made(Zero0Model):  # noqa: N801
        def synchronize(self):
            super().synchronize()
            for bucket in self.buckets if dist.get_world_size() > 1 else ():
                bucket.gradients /= dist.get_world_size()


@sharding("the module has the values of the pieces: on 2 ranks, it left", 2)
class NoRefresh(Zero1):
    class made(Zero1Model):  # noqa: N801
        def refresh(self): ...

    def shard(self, module, spec, mesh, sums):
        return self.made(module, mesh, sums, self.options)


# compression

compression = lambda told: planted("compression", "name", told, 2)  # noqa: E731


class _Compression(LossyCompression):
    Options = CompressionOptions

    def compressor(self, bucket, group):
        return self.made(bucket, group)


class _Sum(Compressor):
    def all_reduce(self, gradients, scale):
        dist.all_reduce(gradients, group=self.group)


@compression("goes on after a resume as if nothing had been")
class HiddenResidual(_Compression):
    class made(_Sum):  # noqa: N801
        def all_reduce(self, gradients, scale):
            gradients += getattr(self, "kept", 0)
            sent = gradients.bfloat16()
            self.kept = gradients - sent
            gradients.copy_(sent)
            super().all_reduce(gradients, scale)


@compression("its sum is that of the gradients, nearly: .* 0.50 on 2 ranks .* 0.33 on 3")
class MeanCompression(_Compression):
    class made(_Sum):  # noqa: N801
        def all_reduce(self, gradients, scale):
            super().all_reduce(gradients, scale)
            gradients /= self.group.size()


@compression("left other gradients on each rank")
class SumOfOneRank(_Compression):
    class made(_Sum):  # noqa: N801
        def all_reduce(self, gradients, scale):
            super().all_reduce(gradients, scale)
            gradients += 1e-3 * dist.get_rank()


@compression("its sum is not finite where a gradient is not: .* took the update")
class SwallowsInfinity(_Compression):
    class made(_Sum):  # noqa: N801
        def all_reduce(self, gradients, scale):
            super().all_reduce(gradients.nan_to_num_(posinf=0, neginf=0), scale)


# pipeline schedule

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


# communicator: the backend is registered under the plugin's name


communicator = lambda told: planted("communicator", "name", told, 2)  # noqa: E731


class _Communicator(Communicator):
    def backend(self):
        def create(options, _):
            place = options.store, options.group_rank, options.group_size, options.timeout
            gloo = dist.ProcessGroupGloo(*place)
            return self.group(group_around(gloo, options, dist.ProcessGroup.BackendType.GLOO, ["cpu"]))

        dist.Backend.register_backend(self.name, create, extended_api=True, devices=["cpu"])
        return self.name

    def device(self, identity):
        return torch.device("cpu")


class _Over(PythonGroup):
    """The operations of gloo, of which one is wrong."""

    def __init__(self, inner):
        super().__init__(inner.rank(), inner.size())
        self.inner = inner

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


@communicator("raised RuntimeError: .* desired output type Long in MeanOfRanks.group.allreduce")
class MeanOfRanks(_Communicator):
    class group(_Over):  # noqa: N801
        def allreduce(self, tensors, options):
            work = self.inner.allreduce(tensors, options)
            work.wait()
            for one in tensors:
                one /= self.size()
            return work


@communicator("torch.distributed give the right numbers: .* broadcast from the last rank of ")
class BroadcastOfRank0(_Communicator):
    class group(_Over):  # noqa: N801
        def broadcast(self, tensors, options):
            options.rootRank = 0
            return self.inner.broadcast(tensors, options)


@hookimpl
def hpctrain_parallelism():
    return [*of_slot("parallelism"), CutsFirst, CutsAnew]


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
def hpctrain_communicator():
    return of_slot("communicator")
