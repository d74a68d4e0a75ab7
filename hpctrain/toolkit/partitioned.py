"""The common part of ZeRO stages 1 and 2 (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", 2020).

Parameters lie in flat buckets. Each rank of dp_shard owns an equal slice of every bucket: it gets the summed gradients of its
slice and updates it; then all ranks gather the slices. The optimizer sees rectangles of parameters.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.api import (
    BucketSum,
    ByteSize,
    Field,
    GradientBucket,
    GradientSums,
    Options,
    Piece,
    Sharding,
    Span,
    copy_to_host,
)
from hpctrain.toolkit.bucketed import BucketedModel
from hpctrain.toolkit.buckets import Bucket, BucketEntry
from hpctrain.toolkit.checkpoint.rectangles import Rectangle
from hpctrain.toolkit.offload import host_copy, is_needed, warn_if_useless


class PartitionedOptions(Options):
    reduce_bucket_size: ByteSize = Field(
        default=25_000_000, gt=0, description="largest bucket of gradients that is summed"
    )
    allgather_bucket_size: ByteSize = Field(
        default=500_000_000,
        gt=0,
        description="largest bucket of parameters that is gathered; the smaller of the two limits applies",
    )
    offload_optimizer: bool = Field(default=False, description="keep optimizer state and its parameters in host memory")
    pin_memory: bool = Field(default=True, description="pin that host memory, for faster copies")


@dataclass
class BucketSlice:
    """This rank's slice of one bucket."""

    parameters: Tensor
    """(numel,): all parameters of the bucket; the module's parameters are views into it."""
    own: Tensor
    """(share,): this rank's slice of them."""
    gradients: Tensor
    """(share,): the summed gradients of the slice."""
    master: Tensor
    """The tensor that the optimizer updates: `own`, or its copy in host memory."""
    master_gradients: Tensor
    pieces: list[tuple[Piece, Tensor]]
    """Rectangles of `master`, each with its gradient."""
    sum: BucketSum
    """Sums the gradients over the replicas."""


class Partitioned(Sharding):
    """Shards the optimizer's state over dp_shard."""

    options: PartitionedOptions
    tells_spans = True
    sums_by_piece = True

    def axes(self, ranks: int, replicate: int) -> dict[str, int]:
        return {"dp_replicate": replicate, "dp_shard": ranks // replicate}


class PartitionedModel(BucketedModel):
    """Each rank updates its slice of every bucket. A subclass's `synchronize` ends with `sum_over_replicas` and `hand_over`."""

    axis = "dp_shard"
    parts: list[BucketSlice]
    """This rank's slices, in the order of the buckets."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, sums: GradientSums, options: PartitionedOptions) -> None:
        # the smaller limit: the same buckets are summed and gathered
        super().__init__(module, sums, min(options.reduce_bucket_size, options.allgather_bucket_size), sliced=True)
        self._replicas = mesh["dp_replicate"].size()
        self.options = options

    def materialized(self) -> None:
        super().materialized()
        # a rank may have no bucket: nothing of the model is trained on its pipeline stage
        device = next((bucket.entries[0].local.device for bucket in self.buckets), torch.device("cpu"))
        warn_if_useless(self.options.offload_optimizer, device)
        self._offloads = is_needed(self.options.offload_optimizer, device)
        self.parts = [self._lay_out(bucket) for bucket in self.buckets]

    @torch.no_grad()
    def _lay_out(self, bucket: Bucket) -> BucketSlice:
        """Move the bucket's parameters into one buffer, and cut out this rank's slice."""
        flat = bucket.buffer()
        for entry in bucket.entries:
            view = entry.view(flat)
            view.copy_(entry.local)
            entry.move_to(view)
        own = bucket.own_slice(flat)  # a view: the optimizer's updates are in the module's parameters at once
        gradients = self.slice_of_gradients(bucket)
        master, master_gradients = own, gradients
        if self._offloads:
            master, master_gradients = (host_copy(t, self.options.pin_memory) for t in (own, gradients))
        begin = bucket.group.rank() * bucket.share
        pieces = [
            (piece, gradient)
            for entry in bucket.entries
            for piece, gradient in _owned(entry, begin, master, master_gradients)
        ]
        first = master_gradients.storage_offset()  # not 0 in stage 1, whose gradients are a slice of the bucket's
        spans = [Span(piece, int(gradient.storage_offset() - first)) for piece, gradient in pieces]
        content = GradientBucket(spans, bucket.share, bucket.dtype, gradients.device)
        over_replicas = self._sums.bucket(content, "dp_replicate")
        return BucketSlice(flat, own, gradients, master, master_gradients, pieces, over_replicas)

    @abstractmethod
    def slice_of_gradients(self, bucket: Bucket) -> Tensor:
        """(share,): the memory for the summed gradients of this rank's slice."""

    def sum_over_replicas(self) -> None:
        """Hybrid sharding: sum the sums of dp_shard over the replicas."""
        if self._replicas > 1:
            # a list: all sums begin before one is waited for
            for finish in [part.sum.all_reduce(part.gradients) for part in self.parts]:
                finish()

    def hand_over(self) -> None:
        """Give every piece its gradient."""
        if self._offloads:
            copy_to_host([part.master_gradients for part in self.parts], [part.gradients for part in self.parts])
        for part in self.parts:
            for piece, gradient in part.pieces:
                piece.tensor.grad = gradient
        self.begins_step = True

    @torch.no_grad()
    def adopt(self) -> None:
        for part in self.parts if self._offloads else ():  # else the master is the slice itself
            part.master.copy_(part.own)

    @torch.no_grad()
    def refresh(self) -> None:
        for part in self.parts:
            if self._offloads:
                part.own.copy_(part.master, non_blocking=True)  # whoever changes the master refreshes again
        shared = [(bucket, part) for bucket, part in zip(self.buckets, self.parts, strict=True) if bucket.slices > 1]
        if shared:
            works = [  # all at once: the network has the next gather while one ends
                dist.all_gather_single(part.parameters, part.own, group=bucket.group, async_op=True)
                for bucket, part in shared
            ]
            for work in works:
                assert work is not None
                work.wait()

    def pieces(self) -> list[Piece]:
        return [piece for part in reversed(self.parts) for piece, _ in part.pieces]  # buckets are in backward's order


def _owned(entry: BucketEntry, begin: int, master: Tensor, gradients: Tensor) -> list[tuple[Piece, Tensor]]:
    """The pieces of `entry` in the slice `master`, which begins at element `begin` of the bucket, with their gradients."""
    cut = []
    for span in entry.spans():
        base = span.piece
        # the span's elements in the slice
        low, high = max(begin - span.begin, 0), min(begin + len(master) - span.begin, span.numel)
        place = span.begin + low - begin
        for offsets, lengths in rectangles(tuple(base.tensor.shape), low, high):
            end = place + prod(lengths)
            tensor, gradient = (flat[place:end].view(lengths) for flat in (master, gradients))
            place = end
            absolute = tuple(a + b for a, b in zip(base.offsets, offsets, strict=True))
            # a parameter: optimizers take leaves only, and a view of the slice is none
            piece = Piece(entry.name, base.shape, absolute, nn.Parameter(tensor), (*base.axes, "dp_shard"))
            cut.append((piece, gradient))
    return cut


def rectangles(shape: tuple[int, ...], begin: int, end: int) -> list[Rectangle]:
    """Cut the elements `begin` to `end` of a row-major tensor of `shape` into rectangles, in the order of the elements.

    These are the rest of a first row, whole rows, and the start of a last row. Partial rows are cut in the same way, so there
    are at most 2 x dims - 1 rectangles.
    """
    if begin >= end:
        return []
    if not shape:
        return [Rectangle((), ())]
    row = prod(shape[1:])
    first, into_first = divmod(begin, row)
    last, into_last = divmod(end, row)
    if first == last:
        return _in_row(first, rectangles(shape[1:], into_first, into_last))
    rows: list[Rectangle] = []
    if into_first:
        rows += _in_row(first, rectangles(shape[1:], into_first, row))
        first += 1
    if first < last:
        rows.append(Rectangle((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return rows + _in_row(last, rectangles(shape[1:], 0, into_last))


def _in_row(row: int, inner: list[Rectangle]) -> list[Rectangle]:
    return [Rectangle((row, *offsets), (1, *lengths)) for offsets, lengths in inner]
