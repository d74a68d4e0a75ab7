"""A sharded model whose gradients meet in flat buckets, which are reduced in one order on all ranks: ZeRO's stages 0, 1 and 2.

Not torch's DistributedDataParallel: the module stays unwrapped, so names don't change and no runner needs a wrapper, and
parameters that a rank did not use count as zeros instead of an error (docs/decisions/0005).
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from torch import nn

from hpctrain.api import GradientSums, ShardedModel
from hpctrain.toolkit.buckets import Bucket, BucketEntry, make_buckets


class BucketedModel(ShardedModel):
    """Gradients in flat buckets. A subclass decides when a bucket is reduced, and how.

    Its `synchronize` calls `finish_reducing`, gives each piece its gradient and sets `begins_step`.
    """

    axis: ClassVar[str]
    """The axis over which whole buckets are summed."""
    buckets: list[Bucket]
    """The buckets in the order in which backward fills them; each has its `sum` over the axis."""
    begins_step: bool
    """Whether the next micro batch is the first of a step: its gradients replace the earlier ones."""
    interleaved: bool
    """Whether the step's forwards and backwards run in any order."""
    is_last: bool
    """Whether this backward is the step's last one, and no other runs beside it."""
    reduced: int
    """The number of buckets that this backward has begun to reduce."""

    def __init__(self, module: nn.Module, sums: GradientSums, bucket_bytes: int, sliced: bool = False) -> None:
        """bucket_bytes: of the largest bucket. sliced: whether each rank of its group owns an equal slice of it."""
        super().__init__(module)
        self._sums, self._bucket_bytes, self._sliced = sums, bucket_bytes, sliced

    def materialized(self) -> None:
        group_of = partial(self._sums.group, self.axis)
        self.buckets = make_buckets(self.module, self._bucket_bytes, group_of, self._sliced)
        self.reduced = 0
        self.begins_step = True
        # A parameter keeps its hooks where the garbage collector does not look: a hook with a reference to the model, which has
        # the parameter, would keep both as long as the process lives.
        ready = weakref.WeakMethod(self._ready)
        for number, bucket in enumerate(self.buckets):
            bucket.sum = self._sums.bucket(bucket.content, self.axis)
            for place, entry in enumerate(bucket.entries):
                entry.parameter.register_post_accumulate_grad_hook(partial(_call, ready, number, place))

    def begin(self, last: bool, interleaved: bool = False) -> None:
        """Begin a backward: whole gradients stay in their buckets until the step's last one."""
        if self.begins_step:
            for bucket in self.buckets:
                bucket.forget()
        self.begins_step, self.is_last = False, last and not interleaved
        self.await_gradients(interleaved)

    @abstractmethod
    def gradient_made(self, bucket: Bucket, entry: BucketEntry) -> None:
        """Act on a complete gradient of this backward; not called for a mere part of one (`BucketEntry.is_to_be_summed`)."""

    @abstractmethod
    def reduce(self, bucket: Bucket) -> None:
        """Begin to sum the bucket over the ranks, and set `bucket.finish` to a function that waits for the sum.

        Called for the same buckets in the same order on all ranks.
        """

    def await_gradients(self, interleaved: bool) -> None:
        """Prepare for a backward, or for all backwards of a step that interleave."""
        self.interleaved, self.reduced = interleaved, 0
        for bucket in self.buckets:
            bucket.waiting = len(bucket.entries)

    def reduce_full(self) -> None:
        """Reduce the full buckets up to the first that is not full: all ranks begin the sums in one order."""
        while self.reduced < len(self.buckets) and self.buckets[self.reduced].waiting == 0:
            self._reduce_next()

    def reduce_rest(self) -> None:
        """Reduce the remaining buckets, too: those with parameters that this rank did not use."""
        if self.interleaved:
            self._sum_parts()
        while self.reduced < len(self.buckets):
            self._reduce_next()

    def finish_reducing(self) -> None:
        """Wait until every bucket is reduced."""
        self.reduce_rest()
        for bucket in self.buckets:
            if bucket.finish is not None:
                bucket.finish()
                bucket.finish = None

    def _ready(self, number: int, place: int) -> None:
        bucket = self.buckets[number]
        entry = bucket.entries[place]
        bucket.waiting -= 1
        if entry.is_to_be_summed:
            if self.interleaved:
                return  # until `_sum_parts`
            # not when the bucket is full: the axis's other ranks have other parts of parameters in theirs
            entry.sum_parts()
        self.gradient_made(bucket, entry)

    def _sum_parts(self) -> None:
        """Sum parts of gradients that could not be summed during backward: where it is split in two, torch gives each rank's
        gradients in an order of its own, and sums of parameters of one shape would be mixed up."""
        entries = [entry for bucket in self.buckets for entry in bucket.entries if entry.is_to_be_summed]
        for entry in sorted(entries, key=lambda entry: entry.name):  # by name: an order that the ranks share
            entry.sum_parts()

    def _reduce_next(self) -> None:
        bucket = self.buckets[self.reduced]
        self.reduced += 1
        self.reduce(bucket)


def _call(ready: Callable[[], Callable[[int, int], None] | None], number: int, place: int, _: nn.Parameter) -> None:
    method = ready()
    if method is not None:  # a model that outlives its job
        method(number, place)
