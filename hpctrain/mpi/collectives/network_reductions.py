"""Reductions over the network.

A large tensor is cut into blocks. Of each block, every rank receives its piece from all others and adds them up; then all
ranks gather the sums. A small tensor is gathered whole on every rank. All tensors are plain (see transfer/buffers.py) and
checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hpctrain.mpi.collectives.arithmetic import Reduction
from hpctrain.mpi.collectives.protocol import SMALL
from hpctrain.mpi.transfer.channel import Channel

# Scratch per reduction. It should stay in the cache, but pieces must not become tiny with many ranks.
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
    """Reduce a plain tensor in place on the root. The tensors of other ranks do not change."""
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
    """Reduce `inputs`, one plain tensor of the output's size for each rank; `output` gets this rank's sum.

    `output` may be the same memory as this rank's own input. It must not overlap the other inputs.
    """
    flat = [tensor.view(-1) for tensor in inputs]
    width = _block_elements(channel, output.dtype)
    for start in range(0, output.numel(), width):
        pieces = [tensor[start : start + width] for tensor in flat]
        _reduce_own_piece(channel, pieces, reduction, output.view(-1)[start : start + width])


def _reduce_own_piece(channel: Channel, pieces: Sequence[Tensor], reduction: Reduction, output: Tensor) -> None:
    """Send `pieces[r]` to rank r and reduce the pieces that arrive here into `output`."""
    own = pieces[channel.rank]
    scratch = channel.scratch(own.nbytes * channel.size).view(own.dtype)
    width = own.numel()
    arrived = [own if r == channel.rank else scratch[r * width : (r + 1) * width] for r in range(channel.size)]
    channel.exchange([(r, pieces[r]) for r in channel.others], [(r, arrived[r]) for r in channel.others])
    # The spare memory must be a piece that is not read again: one of the first two, but not this rank's own.
    reduction(arrived, output, spare=arrived[1 if channel.rank == 0 and channel.size > 1 else 0])


def _block_elements(channel: Channel, dtype: torch.dtype) -> int:
    """How many elements one rank reduces at a time."""
    return max(_BLOCK // channel.size, _LEAST_PIECE) // dtype.itemsize


def _blocks(channel: Channel, flat: Tensor) -> Iterator[Tensor]:
    width = _block_elements(channel, flat.dtype) * channel.size
    return (flat[start : start + width] for start in range(0, flat.numel(), width))


def _shares(channel: Channel, block: Tensor) -> tuple[list[int], list[int], list[Tensor]]:
    """The ranks' shares of a block: counts and offsets in elements, and the pieces. The last pieces may be empty."""
    elements = block.numel()
    width = -(-elements // channel.size)
    width = -(-width // _ALIGNMENT) * _ALIGNMENT
    offsets = [min(rank * width, elements) for rank in range(channel.size)]
    counts = [min(width, elements - offset) for offset in offsets]
    return counts, offsets, [block[o : o + c] for o, c in zip(offsets, counts, strict=True)]
