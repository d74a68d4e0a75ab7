"""Collectives that only move data, through a node's memory.

A small message is passed on in one round. To gather large ones, the ranks meet first. Then they read them in place if they lie in
memory allocated here, or if the system lets them read the owner's memory. Otherwise messages are copied through the outboxes,
block by block.

All tensors are plain (see buffers) and checked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.mpi.transfer.buffers import flattened, same_memory
from hpctrain.mpi.transfer.channel import SMALL
from hpctrain.mpi.transfer.node import OUTBOX, NodeMemory

# From this many bytes per rank on, one copy by the system is faster than two through the outboxes.
_WORTH_FETCHING = 256 * 1024
_LINE = 64  # bytes: where the ranks' parts of an outbox begin


def broadcast(node: NodeMemory, tensor: Tensor, root: int) -> None:
    """Copy the root's bytes to all ranks."""
    for block in torch.split(_bytes(tensor), OUTBOX):
        if node.rank == root:
            node.outbox[: block.numel()].copy_(block)
        node.sync()
        if node.rank != root:
            block.copy_(node.read(root)[: block.numel()])


def all_gather(node: NodeMemory, outputs: Sequence[Tensor], tensor: Tensor) -> None:
    """Gather every rank's `tensor`, all of one size, into `outputs[rank]`. `tensor` may be this rank's output."""
    if tensor.nbytes * node.size <= SMALL:
        _all_gather_in_blocks(node, outputs, tensor)
        return
    own = outputs[node.rank]
    place = node.place(own)
    if not node.is_allocated(place):
        # Others read the input: cache lines just written to the output are expensive to read from another core.
        place = node.place(tensor)
    elif not same_memory(tensor, own):
        flattened(own).copy_(flattened(tensor))
        tensor = own
    node.sync(place)
    places = node.places
    if not node.is_allocated(*places) and (tensor.nbytes < _WORTH_FETCHING or not node.reaches(places)):
        _all_gather_in_blocks(node, outputs, tensor)
        return
    for rank, output in enumerate(outputs):
        if rank != node.rank:
            node.fetch(rank, places[rank], flattened(output))
    if not same_memory(tensor, own):
        flattened(own).copy_(flattened(tensor))
    node.sync()  # others may still be reading


def _all_gather_in_blocks(node: NodeMemory, outputs: Sequence[Tensor], tensor: Tensor) -> None:
    own, targets = _bytes(tensor), [_bytes(output) for output in outputs]
    for start in range(0, max(own.numel(), 1), OUTBOX):
        block = own[start : start + OUTBOX]
        node.outbox[: block.numel()].copy_(block)
        node.sync()
        for rank in range(node.size):
            targets[rank][start : start + OUTBOX].copy_(node.read(rank)[: block.numel()])


def all_gather_small(node: NodeMemory, output: Tensor, tensor: Tensor) -> None:
    """Gather every rank's `tensor` into `output`, in rank order, at most SMALL bytes. The two may share memory."""
    own = flattened(tensor)
    boxes = node.boxes(own.dtype, own.numel())
    boxes[node.rank].copy_(own)
    node.sync()
    torch.cat(boxes, out=flattened(output))


def all_to_all(node: NodeMemory, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Send `inputs[r]` to rank r, receive into `outputs[r]`. All are of one size; outputs and inputs share no memory."""
    sources, targets = [_bytes(tensor) for tensor in inputs], [_bytes(tensor) for tensor in outputs]
    width = OUTBOX // node.size // _LINE * _LINE
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


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
