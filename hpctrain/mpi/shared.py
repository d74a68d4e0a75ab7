"""Collectives through a node's memory. A small message is passed on in one round; a large one is met for first, and read
where it lies if all ranks allocated it there. Else it is copied: gathers from the others' memories, where the system
lets them be read; everything else through the outboxes, block by block.

All tensors are plain (see buffers) and checked. Sums are made by torch in rank order, like those of reduction.py, and so
have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hpctrain.mpi.buffers import flattened, same_memory
from hpctrain.mpi.node import OUTBOX, Node
from hpctrain.mpi.reduction import SMALL, Reduction

_ALIGNMENT = 64  # elements
# An outbox holds the pieces of a block that others are to reduce, and behind them the piece that this rank has reduced.
_RAW = OUTBOX // 2
_CHUNK = 2**20  # bytes

# Bytes of one rank from which on one copy by the system is faster than two through the outboxes.
_WORTH_FETCHING = 256 * 1024

_Finish = Callable[[Tensor], None]


def broadcast(node: Node, tensor: Tensor, root: int) -> None:
    """The root's bytes to all."""
    if tensor.nbytes >= _WORTH_FETCHING:
        node.sync(node.place(tensor))
        place = node.places[root]
        if node.reaches([place]):
            if node.rank != root:
                node.fetch(root, place, flattened(tensor))
            node.sync()  # nobody may write into what others still read
            return
    for block in torch.split(_bytes(tensor), OUTBOX):
        if node.rank == root:
            node.outbox[: block.numel()].copy_(block)
        node.sync()
        if node.rank != root:
            block.copy_(node.read(root)[: block.numel()])


def all_gather(node: Node, outputs: Sequence[Tensor], tensor: Tensor) -> None:
    """All ranks' `tensor`, of one size, into one output for each; `tensor` may be this rank's output."""
    if tensor.nbytes * node.size <= SMALL:
        _all_gather_in_blocks(node, outputs, tensor)
        return
    own = outputs[node.rank]
    place = node.place(own)
    if not node.is_allocated(place):
        # Where the input lies: lines that were just written to the output are dear to read from another core.
        place = node.place(tensor)
    elif not same_memory(tensor, own):
        flattened(own).copy_(flattened(tensor))
        tensor = own
    node.sync(place)
    places = node.places
    if not _are_allocated(node, places) and (tensor.nbytes < _WORTH_FETCHING or not node.reaches(places)):
        _all_gather_in_blocks(node, outputs, tensor)
        return
    for rank, output in enumerate(outputs):
        if rank != node.rank:
            node.fetch(rank, places[rank], flattened(output))
    if not same_memory(tensor, own):
        flattened(own).copy_(flattened(tensor))
    node.sync()  # nobody may write into what others still read


def _all_gather_in_blocks(node: Node, outputs: Sequence[Tensor], tensor: Tensor) -> None:
    own, targets = _bytes(tensor), [_bytes(output) for output in outputs]
    for start in range(0, max(own.numel(), 1), OUTBOX):
        block = own[start : start + OUTBOX]
        node.outbox[: block.numel()].copy_(block)
        node.sync()
        for rank in range(node.size):
            targets[rank][start : start + OUTBOX].copy_(node.read(rank)[: block.numel()])


def all_gather_small(node: Node, output: Tensor, tensor: Tensor) -> None:
    """All ranks' `tensor` one after the other into `output`, of at most SMALL bytes; they may share memory."""
    own = flattened(tensor)
    boxes = node.boxes(own.dtype, own.numel())
    boxes[node.rank].copy_(own)
    node.sync()
    torch.cat(boxes, out=flattened(output))


def all_to_all(node: Node, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """`inputs[r]` to rank r, whose own comes into `outputs[r]`; all of one size; outputs and inputs share no memory."""
    if inputs[0].nbytes >= _WORTH_FETCHING and _all_to_all_where_it_lies(node, outputs, inputs):
        return
    sources, targets = [_bytes(tensor) for tensor in inputs], [_bytes(tensor) for tensor in outputs]
    width = OUTBOX // node.size // _ALIGNMENT * _ALIGNMENT
    others = [rank for rank in range(node.size) if rank != node.rank]
    for start in range(0, max(sources[0].numel(), 1), width):
        end = min(start + width, sources[0].numel())
        for rank in others:
            node.outbox[rank * width : rank * width + end - start].copy_(sources[rank][start:end])
        node.sync()
        for rank in others:
            place = node.rank * width
            targets[rank][start:end].copy_(node.read(rank)[place : place + end - start])
    targets[node.rank].copy_(sources[node.rank])


def _all_to_all_where_it_lies(node: Node, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Whether it is done: the inputs of all ranks can be read."""
    boxes = node.boxes(torch.int64, node.size)
    boxes[node.rank].copy_(torch.tensor([node.place(tensor) for tensor in inputs]))
    node.sync()
    places = [box.tolist() for box in boxes]
    if not node.reaches([place for line in places for place in line]):
        return False
    for rank, output in enumerate(outputs):
        if rank == node.rank:
            output.view(-1).copy_(inputs[rank].view(-1))
        else:
            node.fetch(rank, places[rank][node.rank], flattened(output))
    node.sync()  # nobody may write into what others still read
    return True


def all_reduce(node: Node, tensor: Tensor, reduction: Reduction, finish: _Finish | None = None) -> None:
    """Reduce a plain tensor in place on all ranks.

    finish: makes of the node's sum of a piece the sum over all nodes, in place.
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
    if _are_allocated(node, places):
        versions = [node.at(rank, place, flat) for rank, place in enumerate(places)]
        _all_reduce_where_it_lies(node, versions, reduction, finish)
    else:
        _all_reduce_in_blocks(node, flat, reduction, finish)


def _all_reduce_where_it_lies(
    node: Node, versions: Sequence[Tensor], reduction: Reduction, finish: _Finish | None
) -> None:
    """versions: the ranks' tensors. Each rank reads its piece of all of them, and then the others' sums."""
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
    node.sync()  # nobody may write into what others still read


def _all_reduce_in_blocks(node: Node, flat: Tensor, reduction: Reduction, finish: _Finish | None) -> None:
    """While a block's sums are collected, the next one is already on its way."""
    before: list[Tensor] = []
    for pieces in _blocks(flat, node.size):
        width = pieces[0].numel()
        _put(node, pieces, width)
        versions, sums = _versions(node, pieces, width), _sums(node, before)
        node.sync()
        _collect(node, sums, before)
        own = pieces[node.rank]
        if own.numel():
            result = _sum(node, own, node.rank)
            reduction(versions, result, spare=result)
            if finish is not None:
                finish(result)
            own.copy_(result)
        before = pieces
    sums = _sums(node, before)
    node.sync()
    _collect(node, sums, before)


def reduce_scatter(node: Node, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> None:
    """Reduce `inputs`, one tensor of the output's size for each rank; `output` gets the own one.

    `output` may be the same memory as the own input, and must not overlap the others.
    """
    flat, sources = flattened(output), [flattened(tensor) for tensor in inputs]
    if flat.nbytes * node.size > SMALL:
        node.sync(_place(node, sources))
        places = node.places
        if _are_allocated(node, places):
            first = node.rank * flat.nbytes
            versions = [node.at(rank, place + first, flat) for rank, place in enumerate(places)]
            _reduce(node, versions, flat, reduction)
            node.sync()  # nobody may write into what others still read
            return
    widest = _RAW // node.size // _ALIGNMENT * _ALIGNMENT // flat.element_size()
    for start in range(0, max(flat.numel(), 1), widest):
        whole = flat.numel() <= widest
        pieces = sources if whole else [source[start : start + widest] for source in sources]
        width = pieces[0].numel()
        _put(node, pieces, width)
        versions = _versions(node, pieces, width)
        node.sync()
        target = flat if whole else flat[start : start + widest]
        reduction(versions, target, spare=_sum(node, target, node.rank))


def reduce_scatter_small(node: Node, output: Tensor, tensor: Tensor, reduction: Reduction) -> None:
    """Reduce `tensor`, of at most SMALL bytes, of which `output` gets this rank's piece; they may share memory."""
    whole, own = flattened(tensor), flattened(output)
    outbox = node.boxes(whole.dtype, whole.numel())[node.rank]
    pieces = node.boxes(whole.dtype, own.numel(), node.rank * own.numel())
    outbox.copy_(whole)
    node.sync()
    if own.numel():
        reduction(pieces, own, spare=own)


def _place(node: Node, tensors: Sequence[Tensor]) -> int:
    """Where tensors that lie one after the other begin in the allocated memory; 0 where they do not."""
    first, size = tensors[0], tensors[0].nbytes
    if any(tensor.data_ptr() != first.data_ptr() + rank * size for rank, tensor in enumerate(tensors)):
        return 0
    place = node.place(first)
    return place if _are_allocated(node, [place, node.place(tensors[-1])]) else 0


def _are_allocated(node: Node, places: Sequence[int]) -> bool:
    return all(node.is_allocated(place) for place in places)


def _reduce(node: Node, versions: Sequence[Tensor], output: Tensor, reduction: Reduction) -> None:
    """Reduce what lies in the ranks' memories, in chunks that stay in cache, without writing to it."""
    width = _CHUNK // output.element_size()
    for start in range(0, output.numel(), width):
        chunk = output[start : start + width]
        spare = node.boxes(chunk.dtype, chunk.numel())[node.rank]
        reduction([version[start : start + width] for version in versions], chunk, spare)


def _blocks(flat: Tensor, size: int) -> Iterator[list[Tensor]]:
    """Blocks of about one size that each fit an outbox, as pieces, one for each rank; the last ones may be empty."""
    most = _RAW // flat.element_size() // _ALIGNMENT // size * _ALIGNMENT * size
    count = -(-flat.numel() // most)
    width = _width(-(-flat.numel() // max(count, 1)), size)
    for start in range(0, flat.numel(), max(width, 1) * size):
        yield _pieces(flat, start, width, size)


def _width(elements: int, size: int) -> int:
    """The elements of a piece where `size` ranks share `elements`."""
    return -(-elements // size // _ALIGNMENT) * _ALIGNMENT if elements else 0


def _pieces(flat: Tensor, start: int, width: int, size: int) -> list[Tensor]:
    return [flat[start + rank * width : start + (rank + 1) * width] for rank in range(size)]


# Views of the outboxes are taken before the sync after which they are read: so node.boxes can keep them.


def _put(node: Node, pieces: Sequence[Tensor], width: int) -> None:
    """Write the others' pieces of a block into the outbox, `width` elements apart."""
    for rank, piece in enumerate(pieces):
        if rank != node.rank and piece.numel():
            node.boxes(piece.dtype, piece.numel(), rank * width)[node.rank].copy_(piece)


def _versions(node: Node, pieces: Sequence[Tensor], width: int) -> list[Tensor]:
    """Every rank's version of this rank's piece, after the next sync."""
    own = pieces[node.rank]
    boxes = node.boxes(own.dtype, own.numel(), node.rank * width)
    return [own if rank == node.rank else box for rank, box in enumerate(boxes)]


def _sum(node: Node, piece: Tensor, rank: int) -> Tensor:
    """Where that rank puts its sum of its piece, for the others to collect after the next sync."""
    return node.boxes(piece.dtype, piece.numel(), _RAW // piece.element_size())[rank]


def _sums(node: Node, pieces: Sequence[Tensor]) -> list[Tensor]:
    """Where each rank puts its sum of its piece, after the next sync."""
    return [_sum(node, piece, rank) for rank, piece in enumerate(pieces)]


def _collect(node: Node, sums: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
    """Copy what the others have reduced."""
    for rank, (reduced, piece) in enumerate(zip(sums, pieces, strict=True)):
        if rank != node.rank and piece.numel():
            piece.copy_(reduced)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
