"""ZeRO stage 2: every rank has all parameters, but gradients and optimizer state only for its slice of them."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.api import ByteSize, Field, GradientSums, ModelSpec, Sharding, hookimpl
from hpctrain.toolkit.buckets import Bucket, BucketEntry
from hpctrain.toolkit.partitioned import BucketSlice, Partitioned, PartitionedModel, PartitionedOptions
from hpctrain_plugins.sharding import advice

# the most buckets that may be in flight while the next one is filled
_IN_FLIGHT = 2
# buckets of one kind take turns with a buffer
_Kind = tuple[torch.dtype, dist.ProcessGroup]


class Zero2Options(PartitionedOptions):
    reduce_bucket_size: ByteSize = Field(
        default=25_000_000,
        gt=0,
        description="gradients are summed in buckets of this size; up to three exist at a time",
    )
    overlap_communication: bool = Field(default=True, description="continue backward while a bucket is summed")


class Zero2(Partitioned):
    """ZeRO stage 2: gradients are sharded, too. Every backward sums them bucket by bucket."""

    name = "zero-2"
    divides = frozenset({"gradients", "optimizer state"})
    memory_advice = advice.memory_advice
    Options = Zero2Options
    options: Zero2Options

    def shard(self, module: nn.Module, spec: ModelSpec, mesh: DeviceMesh, sums: GradientSums) -> Zero2Model:
        return Zero2Model(module, mesh, sums, self.options)


class Zero2Model(PartitionedModel):
    """Gradient buckets exist only while they are filled and summed."""

    options: Zero2Options

    def materialized(self) -> None:
        super().materialized()
        self._in_flight: deque[tuple[Bucket, BucketSlice]] = deque()
        self._taken: dict[int, Tensor] = {}
        self._free: dict[_Kind, list[Tensor]] = {}
        for kind in dict.fromkeys(_kind(bucket) for bucket in self.buckets):
            self._free[kind] = self._buffers_for([bucket for bucket in self.buckets if _kind(bucket) == kind])

    def _buffers_for(self, buckets: list[Bucket]) -> list[Tensor]:
        """Scratch buffers that buckets of one kind take turns with. To make a buffer is collective, and ranks that use other
        parameters make gradients in another order, so none is made during a backward."""
        largest = max(buckets, key=lambda bucket: bucket.numel)
        return [largest.buffer() for _ in range(min(len(buckets), self._most_in_flight() + 1))]

    def _most_in_flight(self) -> int:
        return _IN_FLIGHT if self.options.overlap_communication else 0

    def slice_of_gradients(self, bucket: Bucket) -> Tensor:
        return bucket.entries[0].local.new_zeros(bucket.share)

    def begin(self, last: bool, interleaved: bool = False) -> None:
        if not self.begins_step:
            self._end_backward()
        self._first, self.begins_step = self.begins_step, False
        self.await_gradients(interleaved)

    def gradient_made(self, bucket: Bucket, entry: BucketEntry) -> None:
        if self.interleaved:
            return  # buckets are never complete while backwards interleave: gradients accumulate and are summed at the end
        if bucket is self.buckets[self.reduced]:
            self._give_buffer(bucket)
            bucket.take(entry)
        self.reduce_full()

    def _give_buffer(self, bucket: Bucket) -> None:
        if bucket.gradients is None:
            bucket.gradients = self._take_buffer(bucket)

    def reduce(self, bucket: Bucket) -> None:
        self._give_buffer(bucket)
        bucket.fill_all()
        bucket.forget()  # the next backward must not add to gradients in flight
        assert bucket.gradients is not None
        if bucket.slices > 1:
            assert bucket.sum is not None
            bucket.finish = bucket.sum.reduce_scatter(bucket.own_slice(bucket.gradients), bucket.gradients)
        self._in_flight.append((bucket, self.parts[self.reduced - 1]))
        while len(self._in_flight) > self._most_in_flight():
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        bucket, part = self._in_flight.popleft()
        if bucket.finish is not None:
            bucket.finish()
        assert bucket.gradients is not None
        mine = bucket.own_slice(bucket.gradients)
        if self._first:
            part.gradients.copy_(mine)
        else:
            part.gradients.add_(mine)
        self._free[_kind(bucket)].append(self._taken.pop(id(bucket)))
        bucket.finish = bucket.gradients = None

    def _take_buffer(self, bucket: Bucket) -> Tensor:
        """A free buffer. Only the next bucket to be reduced has one, and those in flight give theirs back."""
        free = self._free[_kind(bucket)]
        while not free:
            self._finish_oldest()
        self._taken[id(bucket)] = whole = free.pop()
        return bucket.zero_padding(whole[: bucket.numel])

    def _end_backward(self) -> None:
        self.reduce_rest()
        while self._in_flight:
            self._finish_oldest()

    def synchronize(self) -> None:
        self._end_backward()
        self.sum_over_replicas()
        self.hand_over()


def _kind(bucket: Bucket) -> _Kind:
    return bucket.dtype, bucket.group


@hookimpl
def hpctrain_sharding() -> list[type[Sharding]]:
    return [Zero2]
