"""What ZeRO stages 1 and 2 have in common (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", 2020).

Parameters lie in flat buckets. Each rank of dp_shard owns an equal slice of every bucket: it gets the summed gradients
of its slice, updates it, and all ranks gather the slices. What the optimizer sees are rectangles of parameters.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.api import BucketSum, ByteSize, Field, GradientBucket, GradientSums, Options, Piece, Sharding, Span
from hpctrain_plugins.sharding.bucketed import BucketedModel
from hpctrain_plugins.sharding.buckets import Bucket, Entry
from hpctrain_plugins.sharding.offload import host_copy, is_needed, warn_if_useless
from hpctrain_plugins.sharding.rectangles import rectangles


class PartitionedOptions(Options):
    reduce_bucket_size: ByteSize = Field(
        default=500_000_000, gt=0, description="largest bucket of gradients that is summed"
    )
    allgather_bucket_size: ByteSize = Field(
        default=500_000_000,
        gt=0,
        description="largest bucket of parameters that is gathered; the smaller of both counts",
    )
    contiguous_gradients: bool = Field(
        default=True, description="gradients move into their bucket at once; else when it is reduced"
    )
    offload_optimizer: bool = Field(default=False, description="keep optimizer state and its parameters in host memory")
    pin_memory: bool = Field(default=True, description="pin that host memory, for faster copies")


@dataclass
class Part:
    """What this rank owns of one bucket."""

    parameters: Tensor
    """(numel,): the whole bucket's parameters; the module's are views into it."""
    own: Tensor
    """(share,): this rank's slice of them."""
    gradients: Tensor
    """(share,): the summed gradients of the slice."""
    master: Tensor
    """What the optimizer updates: `own`, or its copy in host memory."""
    master_gradients: Tensor
    pieces: list[tuple[Piece, Tensor]]
    """Rectangles of `master`, each with its gradient."""
    sum: BucketSum
    """How the gradients are summed over the replicas."""


class Partitioned(Sharding):
    """The optimizer's part is sharded over dp_shard."""

    options: PartitionedOptions
    tells_spans = True

    def axes(self, ranks: int, replicate: int) -> dict[str, int]:
        return {"dp_replicate": replicate, "dp_shard": ranks // replicate}


class PartitionedModel(BucketedModel):
    """Each rank updates its slice of every bucket."""

    axis = "dp_shard"

    def __init__(self, module: nn.Module, mesh: DeviceMesh, sums: GradientSums, options: PartitionedOptions) -> None:
        super().__init__(module, mesh, sums, min(options.reduce_bucket_size, options.allgather_bucket_size))
        self.options = options

    def materialized(self) -> None:
        super().materialized()
        device = next((bucket.entries[0].local.device for bucket in self._buckets), torch.device("cpu"))
        warn_if_useless(self.options.offload_optimizer, device)
        self._offloads = is_needed(self.options.offload_optimizer, device)
        self._parts = [self._lay_out(bucket) for bucket in self._buckets]

    @torch.no_grad()
    def _lay_out(self, bucket: Bucket) -> Part:
        """Move the bucket's parameters into one buffer, and cut out what this rank owns."""
        flat, rank = bucket.buffer(self._shard), self._shard.rank()
        for entry in bucket.entries:
            view = entry.view(flat)
            view.copy_(entry.local)
            entry.move_to(view)
        own = bucket.slice_of(flat, rank)
        gradients = self._gradients_of(bucket, rank)
        master, master_gradients = own, gradients
        if self._offloads:
            master, master_gradients = (host_copy(t, self.options.pin_memory) for t in (own, gradients))
        begin = rank * bucket.share
        pieces = [
            (piece, gradient)
            for entry in bucket.entries
            for piece, gradient in _owned(entry, begin, master, master_gradients)
        ]
        first = master_gradients.storage_offset()
        spans = [Span(piece, int(gradient.storage_offset() - first)) for piece, gradient in pieces]
        content = GradientBucket(spans, bucket.share, bucket.dtype, gradients.device)
        over_replicas = self._sums.bucket(content, "dp_replicate")
        return Part(flat, own, gradients, master, master_gradients, pieces, over_replicas)

    @abstractmethod
    def _gradients_of(self, bucket: Bucket, rank: int) -> Tensor:
        """(share,): where the summed gradients of this rank's slice are to lie."""

    def _sum_over_replicas(self) -> None:
        """Hybrid sharding: what the ranks of dp_shard summed is summed over the groups of them."""
        if self._replicate.size() > 1:
            finishes = [part.sum.all_reduce(part.gradients) for part in self._parts]
            for finish in finishes:
                finish()

    def _hand_over(self) -> None:
        """Give every piece its gradient."""
        for part in self._parts:
            if self._offloads:
                part.master_gradients.copy_(part.gradients)
            for piece, gradient in part.pieces:
                piece.tensor.grad = gradient
        self._fresh = True

    @torch.no_grad()
    def refresh(self) -> None:
        for part in self._parts:
            if self._offloads:
                part.own.copy_(part.master)
        if self._shard.size() > 1:
            works = [
                dist.all_gather_single(part.parameters, part.own, group=self._shard, async_op=True)
                for part in self._parts
            ]
            for work in works:
                assert work is not None
                work.wait()

    def pieces(self) -> list[Piece]:
        return [piece for part in reversed(self._parts) for piece, _ in part.pieces]


def _owned(entry: Entry, begin: int, master: Tensor, gradients: Tensor) -> list[tuple[Piece, Tensor]]:
    """What of `entry` lies in the slice `master` that begins at element `begin` of the bucket, with its gradients."""
    cut = []
    for span in entry.spans():
        base = span.piece
        low, high = max(begin - span.begin, 0), min(begin + len(master) - span.begin, span.numel)
        place = span.begin + low - begin
        for offsets, lengths in rectangles(tuple(base.tensor.shape), low, high):
            end = place + prod(lengths)
            tensor, gradient = (flat[place:end].view(lengths) for flat in (master, gradients))
            place = end
            absolute = tuple(a + b for a, b in zip(base.offsets, offsets, strict=True))
            piece = Piece(entry.name, base.shape, absolute, nn.Parameter(tensor), (*base.axes, "dp_shard"))
            cut.append((piece, gradient))
    return cut
