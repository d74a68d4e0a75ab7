"""ZeRO stage 0: every data-parallel rank holds everything, gradients are summed (data parallelism)."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.api import ByteSize, Field, GradientSums, ModelSpec, Options, Piece, Sharding, hookimpl
from hpctrain.toolkit.bucketed import BucketedModel
from hpctrain.toolkit.buckets import Bucket, BucketEntry
from hpctrain_plugins.sharding import advice


class Zero0Options(Options):
    reduce_bucket_size: ByteSize = Field(
        default=25_000_000, gt=0, description="gradients are summed in buckets of this size, while backward goes on"
    )
    overlap_communication: bool = Field(default=True, description="sum a bucket as soon as its gradients are ready")


class Zero0(Sharding):
    """ZeRO stage 0: nothing is sharded."""

    name = "zero-0"
    Options = Zero0Options
    options: Zero0Options
    divides = frozenset()
    memory_advice = advice.memory_advice
    tells_spans = True
    sums_by_piece = True

    def axes(self, ranks: int, replicate: int) -> dict[str, int]:
        return {"dp_replicate": ranks, "dp_shard": 1}

    def shard(self, module: nn.Module, spec: ModelSpec, mesh: DeviceMesh, sums: GradientSums) -> Zero0Model:
        return Zero0Model(module, sums, self.options)


class Zero0Model(BucketedModel):
    """Every rank has all pieces."""

    axis = "dp_replicate"

    def __init__(self, module: nn.Module, sums: GradientSums, options: Zero0Options) -> None:
        super().__init__(module, sums, options.reduce_bucket_size)
        self._overlaps = options.overlap_communication

    def materialized(self) -> None:
        super().materialized()
        self._pieces: dict[str, list[Piece]] = {}
        for bucket in self.buckets:
            bucket.gradients = bucket.buffer()
            for entry in bucket.entries:
                whole = entry.local is entry.parameter
                self._pieces[entry.name] = [
                    piece if whole else replace(piece, tensor=nn.Parameter(piece.tensor)) for piece in entry.pieces
                ]

    def gradient_made(self, bucket: Bucket, entry: BucketEntry) -> None:
        bucket.take(entry)
        if self.is_last and self._overlaps:
            self.reduce_full()

    def reduce(self, bucket: Bucket) -> None:
        gradients = bucket.fill_all()
        if bucket.group.size() > 1:
            assert bucket.sum is not None
            bucket.finish = bucket.sum.all_reduce(gradients)

    def synchronize(self) -> None:
        self.finish_reducing()
        for bucket in self.buckets:
            assert bucket.gradients is not None
            for entry in bucket.entries:
                if entry.local is entry.parameter and len(entry.pieces) == 1:
                    continue  # its gradient lies in the bucket
                for piece, gradient in zip(
                    self._pieces[entry.name], entry.cut(entry.view(bucket.gradients)), strict=True
                ):
                    piece.tensor.grad = gradient
        self.begins_step = True

    def pieces(self) -> list[Piece]:
        return [piece for pieces in reversed(self._pieces.values()) for piece in pieces]


@hookimpl
def hpctrain_sharding() -> list[type[Sharding]]:
    return [Zero0]
