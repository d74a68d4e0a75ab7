"""ZeRO stage 1: every rank has all parameters and gradients, and updates its slice of the parameters."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.api import Field, GradientSums, ModelSpec, Sharding, hookimpl
from hpctrain_plugins.sharding.buckets import Bucket, Entry
from hpctrain_plugins.sharding.partitioned import Partitioned, PartitionedModel, PartitionedOptions


class Zero1Options(PartitionedOptions):
    overlap_communication: bool = Field(
        default=False, description="sum a bucket in the step's last backward as soon as it is full, not after backward"
    )


class Zero1(Partitioned):
    """ZeRO stage 1: the optimizer's state is sharded. Communicates after backward, or behind the last one."""

    name = "zero-1"
    Options = Zero1Options
    options: Zero1Options

    def shard(self, module: nn.Module, spec: ModelSpec, mesh: DeviceMesh, sums: GradientSums) -> Zero1Model:
        return Zero1Model(module, mesh, sums, self.options)


class Zero1Model(PartitionedModel):
    """Whole gradients stay in their buckets until the step's end."""

    options: Zero1Options

    def _gradients_of(self, bucket: Bucket, rank: int) -> Tensor:
        bucket.gradients = bucket.buffer(self._shard)
        return bucket.slice_of(bucket.gradients, rank)

    def _gradient_made(self, bucket: Bucket, entry: Entry) -> None:
        if self.options.contiguous_gradients:
            bucket.fill(entry)
        if self._last and self.options.overlap_communication:
            self._launch_ready()

    def _reduce(self, bucket: Bucket) -> None:
        gradients = bucket.fill_all()
        if self._shard.size() > 1:
            mine = bucket.slice_of(gradients, self._shard.rank())
            assert bucket.sum is not None
            bucket.finish = bucket.sum.reduce_scatter(mine, gradients)

    def synchronize(self) -> None:
        self._finish_sums()
        self._sum_over_replicas()
        self._hand_over()


@hookimpl
def hpctrain_sharding() -> list[type[Sharding]]:
    return [Zero1]
