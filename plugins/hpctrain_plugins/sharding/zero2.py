"""ZeRO stage 2: every rank has all parameters, and the gradients and optimizer state of its slice of them."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.api import ByteSize, Field, GradientSums, ModelSpec, Sharding, hookimpl
from hpctrain_plugins.sharding.buckets import Bucket, Entry, flat_zeros
from hpctrain_plugins.sharding.partitioned import Part, Partitioned, PartitionedModel, PartitionedOptions

_IN_FLIGHT = 2
"""Buckets that may be on their way while the next one is filled."""


class Zero2Options(PartitionedOptions):
    reduce_bucket_size: ByteSize = Field(
        default=25_000_000,
        gt=0,
        description="gradients are summed in buckets of this size; up to three exist at a time",
    )
    overlap_communication: bool = Field(
        default=True, description="go on with backward while a bucket is summed, instead of waiting for it"
    )


class Zero2(Partitioned):
    """ZeRO stage 2: gradients are sharded, too. Every backward sums them, bucket by bucket."""

    name = "zero-2"
    Options = Zero2Options
    options: Zero2Options

    def shard(self, module: nn.Module, spec: ModelSpec, mesh: DeviceMesh, sums: GradientSums) -> Zero2Model:
        return Zero2Model(module, mesh, sums, self.options)


class Zero2Model(PartitionedModel):
    """Buckets of gradients exist while they are filled and summed."""

    options: Zero2Options

    def materialized(self) -> None:
        super().materialized()
        self._in_flight: deque[tuple[Bucket, Part]] = deque()
        self._free: dict[torch.dtype, list[Tensor]] = {bucket.dtype: [] for bucket in self._buckets}
        self._taken: dict[int, Tensor] = {}

    def _gradients_of(self, bucket: Bucket, rank: int) -> Tensor:
        return bucket.entries[0].local.new_zeros(bucket.share)

    def begin(self, last: bool, interleaved: bool = False) -> None:
        if not self._fresh:
            self._end_backward()
        self._first, self._fresh = self._fresh, False
        # a bucket is never complete while backwards interleave: gradients then pile up, and are summed at the end
        self._waits = interleaved
        self._await_gradients()

    def _gradient_made(self, bucket: Bucket, entry: Entry) -> None:
        if self._waits:
            return
        if self.options.contiguous_gradients:
            self._fill(bucket, entry)
        self._launch_ready()

    def _fill(self, bucket: Bucket, entry: Entry) -> None:
        if bucket.gradients is None:
            bucket.gradients = self._take_buffer(bucket)
        bucket.fill(entry)

    def _reduce(self, bucket: Bucket) -> None:
        for entry in bucket.entries:
            self._fill(bucket, entry)
        bucket.forget()  # what the next backward makes is apart from what is on its way
        assert bucket.gradients is not None
        if self._shard.size() > 1:
            mine = bucket.slice_of(bucket.gradients, self._shard.rank())
            assert bucket.sum is not None
            bucket.finish = bucket.sum.reduce_scatter(mine, bucket.gradients)
        self._in_flight.append((bucket, self._parts[self._launched - 1]))
        if not self.options.overlap_communication:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        bucket, part = self._in_flight.popleft()
        if bucket.finish is not None:
            bucket.finish()
        assert bucket.gradients is not None
        mine = bucket.slice_of(bucket.gradients, self._shard.rank())
        if self._first:
            part.gradients.copy_(mine)
        else:
            part.gradients.add_(mine)
        self._free[bucket.dtype].append(self._taken.pop(id(bucket)))
        bucket.finish = bucket.gradients = None

    def _take_buffer(self, bucket: Bucket) -> Tensor:
        """A buffer that is free again, or a new one as long as few are on their way. They are kept from step to step:
        memory that is new to the process costs as much time as a sum over it."""
        free = self._free[bucket.dtype]
        while not free and len(self._in_flight) >= _IN_FLIGHT:
            self._finish_oldest()
        largest = max(one.numel for one in self._buckets if one.dtype == bucket.dtype)
        whole = free.pop() if free else flat_zeros(largest, bucket.entries[0].local, self._shard)
        self._taken[id(bucket)] = whole
        return bucket.zero_padding(whole[: bucket.numel])

    def _end_backward(self) -> None:
        self._launch_rest()
        while self._in_flight:
            self._finish_oldest()

    def synchronize(self) -> None:
        self._end_backward()
        self._sum_over_replicas()
        self._hand_over()


@hookimpl
def hpctrain_sharding() -> list[type[Sharding]]:
    return [Zero2]
