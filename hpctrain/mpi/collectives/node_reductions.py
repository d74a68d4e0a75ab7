"""Reductions through a node's memory.

A small message is passed on in one round. For a large message the ranks meet first. Then they read it in place if all ranks
have it in shared memory; otherwise they copy it through the outboxes, block by block.

All tensors are plain (see buffers) and checked. torch makes the sums in rank order (see arithmetic.py), so they have the
same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from hpctrain.mpi.collectives.arithmetic import Reduction
from hpctrain.mpi.transfer.buffers import flattened
from hpctrain.mpi.transfer.channel import SMALL
from hpctrain.mpi.transfer.node import OUTBOX, NodeMemory

_ALIGNMENT = 64  # elements
_CHUNK = 2**20  # bytes

_Finish = Callable[[Tensor], None]


def all_reduce(node: NodeMemory, tensor: Tensor, reduction: Reduction, finish: _Finish | None = None) -> None:
    """Reduce a plain tensor in place on all ranks.

    finish: turns the node's sum of a piece into the sum over all nodes, in place.
    """
    flat = flattened(tensor)
    if finish is None and flat.nbytes * node.size <= SMALL:
        boxes = node.boxes(flat.dtype, flat.numel())
        boxes[node.rank].copy_(flat)
        node.sync()
        if flat.numel():
            reduction(boxes, flat, spare=flat)
        return
    node.sync(node.place(flat))
    places = node.places
    if node.is_allocated(*places):
        versions = [node.at(rank, place, flat) for rank, place in enumerate(places)]
        _all_reduce_where_it_lies(node, versions, reduction, finish)
    else:
        _all_reduce_in_blocks(node, flat, reduction, finish)


def _all_reduce_where_it_lies(
    node: NodeMemory, versions: Sequence[Tensor], reduction: Reduction, finish: _Finish | None
) -> None:
    """versions: the ranks' tensors. Each rank reads its piece from all of them, and then the sums of the others."""
    pieces = [_pieces(version, 0, _width(version.numel(), node.size), node.size) for version in versions]
    own = pieces[node.rank][node.rank]
    if own.numel():
        _reduce(node, [version[node.rank] for version in pieces], own, reduction)
        if finish is not None:
            finish(own)
    node.sync()
    for rank, reduced in enumerate(pieces):
        if rank != node.rank:
            pieces[node.rank][rank].copy_(reduced[rank])
    node.sync()  # others may still be reading


def _all_reduce_in_blocks(node: NodeMemory, flat: Tensor, reduction: Reduction, finish: _Finish | None) -> None:
    for pieces in _blocks(flat, node.size):
        own, width = pieces[node.rank], pieces[0].numel()
        _put(node, pieces, width)
        versions = _versions(node, pieces, width)
        node.sync()
        sums = [node.boxes(piece.dtype, piece.numel())[rank] for rank, piece in enumerate(pieces)]
        if own.numel():
            result = sums[node.rank]
            reduction(versions, result, spare=result)
            if finish is not None:
                finish(result)
            own.copy_(result)
        node.sync()
        for rank, (reduced, piece) in enumerate(zip(sums, pieces, strict=True)):
            if rank != node.rank and piece.numel():
                piece.copy_(reduced)


def reduce_scatter(node: NodeMemory, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> None:
    """Reduce `inputs`, one tensor of the output's size for each rank; `output` gets this rank's sum.

    `output` may be the same memory as this rank's own input. It must not overlap the other inputs.
    """
    flat, sources = flattened(output), [flattened(tensor) for tensor in inputs]
    if flat.nbytes * node.size > SMALL:
        node.sync(_place(node, sources))
        places = node.places
        if node.is_allocated(*places):
            first = node.rank * flat.nbytes
            versions = [node.at(rank, place + first, flat) for rank, place in enumerate(places)]
            _reduce(node, versions, flat, reduction)
            node.sync()  # others may still be reading
            return
    widest = OUTBOX // node.size // _ALIGNMENT * _ALIGNMENT // flat.element_size()
    for start in range(0, max(flat.numel(), 1), widest):
        whole = flat.numel() <= widest
        pieces = sources if whole else [source[start : start + widest] for source in sources]
        width = pieces[0].numel()
        _put(node, pieces, width)
        versions = _versions(node, pieces, width)
        node.sync()
        target = flat if whole else flat[start : start + widest]
        reduction(versions, target, spare=node.boxes(target.dtype, target.numel())[node.rank])


def reduce_scatter_small(node: NodeMemory, output: Tensor, tensor: Tensor, reduction: Reduction) -> None:
    """Reduce `tensor`, at most SMALL bytes; `output` gets this rank's piece. The two may share memory."""
    whole, own = flattened(tensor), flattened(output)
    outbox = node.boxes(whole.dtype, whole.numel())[node.rank]
    pieces = node.boxes(whole.dtype, own.numel(), node.rank * own.numel())
    outbox.copy_(whole)
    node.sync()
    if own.numel():
        reduction(pieces, own, spare=own)


def _place(node: NodeMemory, tensors: Sequence[Tensor]) -> int:
    """The place in the allocated memory where consecutive tensors begin; 0 if they are not consecutive."""
    first, size = tensors[0], tensors[0].nbytes
    if any(tensor.data_ptr() != first.data_ptr() + rank * size for rank, tensor in enumerate(tensors)):
        return 0
    place = node.place(first)
    return place if node.is_allocated(place, node.place(tensors[-1])) else 0


def _reduce(node: NodeMemory, versions: Sequence[Tensor], output: Tensor, reduction: Reduction) -> None:
    """Reduce the ranks' tensors in chunks that stay in cache, without writing to them."""
    width = _CHUNK // output.element_size()
    for start in range(0, output.numel(), width):
        chunk = output[start : start + width]
        spare = node.boxes(chunk.dtype, chunk.numel())[node.rank]
        reduction([version[start : start + width] for version in versions], chunk, spare)


def _blocks(flat: Tensor, size: int) -> Iterator[list[Tensor]]:
    """Blocks of about equal size that fit an outbox, each as one piece per rank. The last pieces may be empty."""
    most = OUTBOX // flat.element_size() // _ALIGNMENT // size * _ALIGNMENT * size
    count = -(-flat.numel() // most)
    width = _width(-(-flat.numel() // max(count, 1)), size)
    for start in range(0, flat.numel(), max(width, 1) * size):
        yield _pieces(flat, start, width, size)


def _width(elements: int, size: int) -> int:
    """The elements per piece if `size` ranks share `elements`."""
    return -(-elements // size // _ALIGNMENT) * _ALIGNMENT if elements else 0


def _pieces(flat: Tensor, start: int, width: int, size: int) -> list[Tensor]:
    return [flat[start + rank * width : start + (rank + 1) * width] for rank in range(size)]


# Views of the outboxes are taken before the sync and read after it, so that node.boxes can cache them.


def _put(node: NodeMemory, pieces: Sequence[Tensor], width: int) -> None:
    """Write the others' pieces of a block into the outbox, `width` elements apart."""
    for rank, piece in enumerate(pieces):
        if rank != node.rank and piece.numel():
            node.boxes(piece.dtype, piece.numel(), rank * width)[node.rank].copy_(piece)


def _versions(node: NodeMemory, pieces: Sequence[Tensor], width: int) -> list[Tensor]:
    """Every rank's version of this rank's piece, after the next sync."""
    own = pieces[node.rank]
    boxes = node.boxes(own.dtype, own.numel(), node.rank * width)
    return [own if rank == node.rank else box for rank, box in enumerate(boxes)]
