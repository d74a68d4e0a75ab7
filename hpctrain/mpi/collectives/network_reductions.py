"""Reductions over the network.

A large tensor is cut into blocks: every rank gets its piece of a block from all others and adds, and the pieces are
gathered again. Every rank gathers all of a small one. All tensors are plain (see transfer/buffers.py) and checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hpctrain.mpi.collectives.arithmetic import Reduction
from hpctrain.mpi.collectives.protocol import SMALL
from hpctrain.mpi.transfer.channel import Channel

# Scratch per reduction: it stays in the cache, and pieces must not become tiny where ranks are many.
_BLOCK = 8 * 2**20  # bytes
_LEAST_PIECE = 64 * 1024  # bytes
_ALIGNMENT = 64  # elements


def all_reduce(channel: Channel, tensor: Tensor, reduction: Reduction) -> None:
    """Reduce a plain tensor in place on all ranks."""
    flat = tensor.view(-1)
    if flat.nbytes * channel.size <= SMALL:
        gathered = channel.scratch(flat.nbytes * channel.size).view(flat.dtype)
        channel.all_gather(gathered, flat)
        reduction(gathered.chunk(channel.size) if flat.numel() else [flat], flat, spare=flat)
        return
    for block in _blocks(channel, flat):
        counts, offsets, pieces = _shares(channel, block)
        _reduce_own_piece(channel, pieces, reduction, pieces[channel.rank])
        width = block.element_size()
        channel.all_gather_pieces(block, [c * width for c in counts], [o * width for o in offsets])


def reduce(channel: Channel, tensor: Tensor, reduction: Reduction, root: int) -> None:
    """Reduce a plain tensor in place on the root. The others' tensors stay as they are."""
    flat = tensor.view(-1)
    for block in _blocks(channel, flat):
        _, _, pieces = _shares(channel, block)
        mine = pieces[channel.rank] if channel.rank == root else torch.empty_like(pieces[channel.rank])
        _reduce_own_piece(channel, pieces, reduction, mine)
        others = [rank for rank in range(channel.size) if rank != root]
        if channel.rank == root:
            channel.exchange([], [(rank, pieces[rank]) for rank in others])
        else:
            channel.exchange([(root, mine)], [])


def reduce_scatter(channel: Channel, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> None:
    """Reduce `inputs`, one plain tensor of the output's size for each rank; `output` gets the own one.

    `output` may be the same memory as the own input, and must not overlap the others.
    """
    flat = [tensor.view(-1) for tensor in inputs]
    width = _block_elements(channel, output.dtype)
    for start in range(0, output.numel(), width):
        pieces = [tensor[start : start + width] for tensor in flat]
        _reduce_own_piece(channel, pieces, reduction, output.view(-1)[start : start + width])


def _reduce_own_piece(channel: Channel, pieces: Sequence[Tensor], reduction: Reduction, output: Tensor) -> None:
    """`pieces[r]` goes to rank r; the pieces that arrive here are reduced into `output`."""
    own = pieces[channel.rank]
    scratch = channel.scratch(own.nbytes * channel.size).view(own.dtype)
    width = own.numel()
    arrived = [own if r == channel.rank else scratch[r * width : (r + 1) * width] for r in range(channel.size)]
    channel.exchange([(r, pieces[r]) for r in channel.others], [(r, arrived[r]) for r in channel.others])
    # The own piece is still to be read, and the first two others are not read again.
    reduction(arrived, output, spare=arrived[1 if channel.rank == 0 and channel.size > 1 else 0])


def _block_elements(channel: Channel, dtype: torch.dtype) -> int:
    """How many elements one rank reduces at a time."""
    return max(_BLOCK // channel.size, _LEAST_PIECE) // dtype.itemsize


def _blocks(channel: Channel, flat: Tensor) -> Iterator[Tensor]:
    width = _block_elements(channel, flat.dtype) * channel.size
    return (flat[start : start + width] for start in range(0, flat.numel(), width))


def _shares(channel: Channel, block: Tensor) -> tuple[list[int], list[int], list[Tensor]]:
    """How a block is shared: each rank's count and offset, in elements, and the piece itself. The last may be empty."""
    elements = block.numel()
    width = -(-elements // channel.size)
    width = -(-width // _ALIGNMENT) * _ALIGNMENT
    offsets = [min(rank * width, elements) for rank in range(channel.size)]
    counts = [min(width, elements - offset) for offset in offsets]
    return counts, offsets, [block[o : o + c] for o, c in zip(offsets, counts, strict=True)]
