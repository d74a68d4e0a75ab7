"""Data parallelism that sums its gradients after the backward pass, in flat buckets of hpctrain.toolkit."""

from __future__ import annotations

from hpctrain.api import ByteSize, Field, Options, Sharding, hookimpl
from hpctrain.toolkit.bucketed import BucketedModel

AXIS = "dp_late"


class LateSumsOptions(Options):
    bucket_size: ByteSize = Field(default=1_000_000, gt=0, description="gradients are summed in buckets of this size")


class LateSums(Sharding):
    """Nothing is sharded."""

    name = "late-sums"
    Options = LateSumsOptions
    options: LateSumsOptions
    tells_spans = True
    sums_by_piece = True

    def axes(self, ranks, replicate):
        return {AXIS: ranks}

    def shard(self, module, spec, mesh, sums):
        return LateSumsModel(module, sums, self.options.bucket_size)


class LateSumsModel(BucketedModel):
    axis = AXIS

    def materialized(self) -> None:
        super().materialized()
        for bucket in self.buckets:
            bucket.gradients = bucket.entries[0].local.new_zeros(bucket.numel)

    def gradient_made(self, bucket, entry) -> None:
        bucket.take(entry)

    def reduce(self, bucket) -> None:
        bucket.finish = bucket.sum.all_reduce(bucket.fill_all())

    def synchronize(self) -> None:
        self.finish_reducing()
        for bucket in self.buckets:
            for entry in bucket.entries:
                for piece, gradient in zip(entry.pieces, entry.cut(entry.view(bucket.gradients)), strict=True):
                    piece.tensor.grad = gradient
        self.begins_step = True

    def pieces(self):
        return [piece for bucket in reversed(self.buckets) for entry in bucket.entries for piece in entry.pieces]


@hookimpl
def hpctrain_sharding():
    return [LateSums]
