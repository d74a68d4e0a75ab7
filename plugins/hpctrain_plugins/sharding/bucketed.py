"""What stages 0, 1 and 2 have in common: gradients meet in flat buckets, which are reduced in one order on all ranks.

Not torch's DistributedDataParallel: the module stays unwrapped, so that names and runners need not know of it,
and parameters that a rank did not use are zeros instead of an error.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.api import GradientSums, ShardedModel
from hpctrain_plugins.sharding.buckets import Bucket, Entry, make_buckets


class BucketedModel(ShardedModel):
    """Gradients in flat buckets. A subclass says when a bucket may be reduced, and how."""

    axis: ClassVar[str]
    """Over which whole buckets are summed."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, sums: GradientSums, bucket_bytes: int) -> None:
        """bucket_bytes: how large a bucket may be."""
        super().__init__(module)
        self._shard, self._replicate = mesh["dp_shard"].get_group(), mesh["dp_replicate"].get_group()
        self._sums, self._bucket_bytes = sums, bucket_bytes

    def materialized(self) -> None:
        self._buckets = make_buckets(self.module, self._bucket_bytes, self._shard.size())
        self._launched = 0
        self._fresh = True
        for bucket in self._buckets:
            bucket.sum = self._sums.bucket(bucket.content, self.axis)
            for entry in bucket.entries:
                hook = partial(self._ready, bucket, entry)
                entry.parameter.register_post_accumulate_grad_hook(hook)

    def begin(self, last: bool, interleaved: bool = False) -> None:
        """Where whole gradients stay in their buckets until the step's last backward."""
        if self._fresh:
            for bucket in self._buckets:
                bucket.forget()
        self._fresh, self._last = False, last and not interleaved
        self._await_gradients()

    @abstractmethod
    def _gradient_made(self, bucket: Bucket, entry: Entry) -> None:
        """A gradient of this backward is complete."""

    @abstractmethod
    def _reduce(self, bucket: Bucket) -> None:
        """Begin to sum the bucket over the ranks; the same buckets in the same order on all ranks."""

    def _ready(self, bucket: Bucket, entry: Entry, parameter: nn.Parameter) -> None:
        bucket.waiting -= 1
        entry.lay_in_bucket()
        self._gradient_made(bucket, entry)

    def _await_gradients(self) -> None:
        """A backward is about to begin."""
        self._launched = 0
        for bucket in self._buckets:
            bucket.waiting = len(bucket.entries)

    def _launch_ready(self) -> None:
        """Reduce the buckets that are full, as far as those before them are."""
        while self._launched < len(self._buckets) and self._buckets[self._launched].waiting == 0:
            self._launch()

    def _launch_rest(self) -> None:
        """Reduce the others, too: those with parameters that this rank did not use."""
        while self._launched < len(self._buckets):
            self._launch()

    def _launch(self) -> None:
        bucket = self._buckets[self._launched]
        self._launched += 1
        self._reduce(bucket)

    def _finish_sums(self) -> None:
        """Wait until every bucket is reduced."""
        self._launch_rest()
        for bucket in self._buckets:
            if bucket.finish is not None:
                bucket.finish()
                bucket.finish = None
