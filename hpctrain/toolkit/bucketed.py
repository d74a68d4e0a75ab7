"""A sharded model whose gradients meet in flat buckets, which are reduced in one order on all ranks: ZeRO's stages 0, 1 and 2.

Not torch's DistributedDataParallel: the module stays unwrapped, so that names and runners need not know of it,
and parameters that a rank did not use are zeros instead of an error.
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
    """Gradients in flat buckets. A subclass says when a bucket may be reduced, and how.

    Its `synchronize` calls `finish_reducing`, gives each piece its gradient and sets `begins_step`.
    """

    axis: ClassVar[str]
    """The axis over which whole buckets are summed."""
    buckets: list[Bucket]
    """Buckets in the order in which backward makes them full; each has its `sum` over the axis."""
    begins_step: bool
    """Whether the next micro batch is the first one of a step: its gradients take the place of those before."""
    interleaved: bool
    """Whether the step's forwards and backwards run in any order."""
    is_last: bool
    """Whether this backward is the last one of the step, and makes one gradient after the other."""
    reduced: int
    """How many buckets this backward has begun to reduce."""

    def __init__(self, module: nn.Module, sums: GradientSums, bucket_bytes: int, sliced: bool = False) -> None:
        """bucket_bytes: how large a bucket may be. sliced: whether each rank of its group owns an equal slice of it."""
        super().__init__(module)
        self._sums, self._bucket_bytes, self._sliced = sums, bucket_bytes, sliced

    def materialized(self) -> None:
        group_of = partial(self._sums.group, self.axis)
        self.buckets = make_buckets(self.module, self._bucket_bytes, group_of, self._sliced)
        self.reduced = 0
        self.begins_step = True
        # A parameter keeps its hooks where the garbage collector does not look: one that held the model, which holds the
        # parameter, would keep both for as long as the process lives.
        ready = weakref.WeakMethod(self._ready)
        for number, bucket in enumerate(self.buckets):
            bucket.sum = self._sums.bucket(bucket.content, self.axis)
            for place, entry in enumerate(bucket.entries):
                entry.parameter.register_post_accumulate_grad_hook(partial(_call, ready, number, place))

    def begin(self, last: bool, interleaved: bool = False) -> None:
        """Begin a backward where whole gradients stay in their buckets until the step's last one."""
        if self.begins_step:
            for bucket in self.buckets:
                bucket.forget()
        self.begins_step, self.is_last = False, last and not interleaved
        self.await_gradients(interleaved)

    @abstractmethod
    def gradient_made(self, bucket: Bucket, entry: BucketEntry) -> None:
        """A gradient of this backward is complete; not called while it is only a part of one (`BucketEntry.is_to_be_summed`)."""

    @abstractmethod
    def reduce(self, bucket: Bucket) -> None:
        """Begin to sum the bucket over the ranks, and leave in `bucket.finish` what waits for it.

        Called for the same buckets in the same order on all ranks.
        """

    def await_gradients(self, interleaved: bool) -> None:
        """A backward is about to begin, or all of the step."""
        self.interleaved, self.reduced = interleaved, 0
        for bucket in self.buckets:
            bucket.waiting = len(bucket.entries)

    def reduce_full(self) -> None:
        """Reduce the buckets that are full, as far as those before them are."""
        while self.reduced < len(self.buckets) and self.buckets[self.reduced].waiting == 0:
            self._reduce_next()

    def reduce_rest(self) -> None:
        """Reduce the others, too: those with parameters that this rank did not use."""
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
                return
            # not when the bucket is full: the axis's other ranks have other parts of parameters in theirs
            entry.sum_parts()
        self.gradient_made(bucket, entry)

    def _sum_parts(self) -> None:
        """Sum what could not be summed during backward: where it is split in two, torch gives a rank's gradients in an order of
        its own. Sums of parameters of one shape would be mixed up."""
        entries = [entry for bucket in self.buckets for entry in bucket.entries if entry.is_to_be_summed]
        for entry in sorted(entries, key=lambda entry: entry.name):
            entry.sum_parts()

    def _reduce_next(self) -> None:
        bucket = self.buckets[self.reduced]
        self.reduced += 1
        self.reduce(bucket)


def _call(ready: Callable[[], Callable[[int, int], None] | None], number: int, place: int, _: nn.Parameter) -> None:
    method = ready()
    if method is not None:  # a model that outlives its job
        method(number, place)
