"""ZeRO stage 1: every rank has all parameters and gradients, and updates its slice of the parameters."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.api import Field, GradientSums, ModelSpec, Sharding, hookimpl
from hpctrain.toolkit.buckets import Bucket, BucketEntry
from hpctrain.toolkit.partitioned import Partitioned, PartitionedModel, PartitionedOptions
from hpctrain_plugins.sharding import advice


class Zero1Options(PartitionedOptions):
    overlap_communication: bool = Field(
        default=True, description="sum a bucket in the step's last backward as soon as it is full, not after backward"
    )


class Zero1(Partitioned):
    """ZeRO stage 1: the optimizer's state is sharded. Communicates during the last backward, or after it."""

    name = "zero-1"
    divides = frozenset({"optimizer state"})
    memory_advice = advice.memory_advice
    Options = Zero1Options
    options: Zero1Options

    def shard(self, module: nn.Module, spec: ModelSpec, mesh: DeviceMesh, sums: GradientSums) -> Zero1Model:
        return Zero1Model(module, mesh, sums, self.options)


class Zero1Model(PartitionedModel):
    """Full gradients gather in their buckets until the step's last backward sums them."""

    options: Zero1Options

    def slice_of_gradients(self, bucket: Bucket) -> Tensor:
        bucket.gradients = bucket.buffer()
        return bucket.own_slice(bucket.gradients)

    def gradient_made(self, bucket: Bucket, entry: BucketEntry) -> None:
        bucket.take(entry)
        if self.is_last and self.options.overlap_communication:
            self.reduce_full()

    def reduce(self, bucket: Bucket) -> None:
        gradients = bucket.fill_all()
        if bucket.slices > 1:
            assert bucket.sum is not None
            bucket.finish = bucket.sum.reduce_scatter(bucket.own_slice(gradients), gradients)

    def synchronize(self) -> None:
        self.finish_reducing()
        self.sum_over_replicas()
        self.hand_over()


@hookimpl
def hpctrain_sharding() -> list[type[Sharding]]:
    return [Zero1]
