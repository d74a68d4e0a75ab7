"""Reductions, in torch arithmetic and a fixed order: rank 0, then 1, then 2 and so on, for each element on its own.

So a sum has the same bits on all ranks, whatever the size of the message, the bucket it was part of, or the MPI. bf16
and fp16 travel as 16 bits, are added in float32 and rounded once.

A large tensor is cut into blocks; in each, every rank gets its piece from all others, adds, and the pieces are gathered
again. A small one is gathered whole by everybody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from hpctrain.mpi.buffers import same_memory
from hpctrain.mpi.channel import Channel

# Up to here a message is gathered whole: one exchange instead of two. Bytes over all ranks.
SMALL = 256 * 1024
# Scratch per reduction: it stays in the cache, and pieces must not become tiny where ranks are many.
_BLOCK = 8 * 2**20  # bytes
_LEAST_PIECE = 64 * 1024  # bytes
_ALIGNMENT = 64  # elements

_Combine = Callable[[Tensor, Tensor, Tensor], object]

_ARITHMETIC: dict[ReduceOp.RedOpType, _Combine] = {
    ReduceOp.SUM: lambda a, b, out: torch.add(a, b, out=out),
    ReduceOp.PRODUCT: lambda a, b, out: torch.mul(a, b, out=out),
    ReduceOp.MIN: lambda a, b, out: torch.minimum(a, b, out=out),
    ReduceOp.MAX: lambda a, b, out: torch.maximum(a, b, out=out),
    ReduceOp.BAND: lambda a, b, out: torch.bitwise_and(a, b, out=out),
    ReduceOp.BOR: lambda a, b, out: torch.bitwise_or(a, b, out=out),
    ReduceOp.BXOR: lambda a, b, out: torch.bitwise_xor(a, b, out=out),
}
# A truth value saturates: one true is enough for a sum, one false for a product.
_TRUTH = {ReduceOp.SUM: ReduceOp.BOR, ReduceOp.PRODUCT: ReduceOp.BAND}
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_FRACTIONAL = (ReduceOp.AVG, ReduceOp.PREMUL_SUM)
_PREMUL_SUM = ReduceOp.PREMUL_SUM.value  # comparing torch's enums themselves takes a microsecond
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Reduction:
    """How elements of a dtype are combined.

    factor: what each summand is multiplied with first (PREMUL_SUM). divisor: what the sum is divided by last (AVG).
    """

    combine: _Combine
    factor: float | Tensor | None = None
    divisor: int | None = None

    @staticmethod
    def of(op: ReduceOp, dtype: torch.dtype, size: int) -> Reduction:
        """The reduction that torch's `op` means for `dtype` in a group of `size` ranks.

        Raises ValueError where the two do not go together.
        """
        kind = kind_of(op)
        number = kind.value
        if number != _PREMUL_SUM:
            return _plain_reduction(number, dtype, size)
        # Python gets at the factor only by way of the pickled form.
        factor = op.__getstate__()[1]  # type: ignore[attr-defined]
        return Reduction(_arithmetic(kind, dtype), factor)

    def __call__(self, pieces: Sequence[Tensor], output: Tensor, spare: Tensor) -> None:
        """Combine the pieces, (elements,) each, of all ranks in rank order into `output`.

        `output` may be the same memory as one of the pieces. spare: memory for the running total, which must be none
        of the third and later pieces; `output` itself where that is apart from all.
        """
        if output.dtype in _HALF:
            total = pieces[0].float()
            if self.factor is not None:
                total.mul_(self.factor)
            for piece in pieces[1:]:
                summand = piece.float()
                if self.factor is not None:
                    summand.mul_(self.factor)
                self.combine(total, summand, total)
            if self.divisor is not None:
                total.div_(self.divisor)
            output.copy_(total)
            return
        if self.factor is not None:
            pieces = [piece * self.factor for piece in pieces]
        total = pieces[0]
        last = len(pieces) - 1
        for rank in range(1, last + 1):
            into = output if rank == last else spare
            self.combine(total, pieces[rank], into)
            total = into
        if last == 0 and not same_memory(total, output):
            output.copy_(total)
        if self.divisor is not None:
            output.div_(self.divisor)


@cache  # by the number, since hashing torch's enum takes longer than the rest
def _plain_reduction(number: int, dtype: torch.dtype, size: int) -> Reduction:
    kind = ReduceOp.RedOpType(number)
    return Reduction(_arithmetic(kind, dtype), None, size if kind == ReduceOp.AVG else None)


def kind_of(op: ReduceOp) -> ReduceOp.RedOpType:
    """Which operation a ReduceOp is; it may carry a factor, too."""
    return op.op  # type: ignore[attr-defined, no-any-return] # torch's stub lacks it


@cache
def _arithmetic(kind: ReduceOp.RedOpType, dtype: torch.dtype) -> _Combine:
    if dtype.is_floating_point and dtype.itemsize == 1:
        raise ValueError(f"found a reduction of {dtype}, expected a wider type: 8-bit floats have no arithmetic")
    fractional = dtype.is_floating_point or dtype.is_complex
    if kind in _BITWISE and fractional:
        raise ValueError(f"found {kind.name} of {dtype}, expected an integer or bool tensor")
    if kind in _FRACTIONAL and not fractional:
        raise ValueError(f"found {kind.name} of {dtype}, expected a floating-point tensor; use SUM and divide")
    if dtype.is_complex and kind not in (ReduceOp.SUM, *_FRACTIONAL):
        raise ValueError(f"found {kind.name} of {dtype}, expected SUM or AVG for complex tensors")
    if kind in _FRACTIONAL:
        kind = ReduceOp.SUM
    elif dtype == torch.bool:
        kind = _TRUTH.get(kind, kind)
    combine = _ARITHMETIC[kind]
    one = torch.ones(1, dtype=dtype)
    try:
        combine(one, one, one.clone())
    except RuntimeError as error:
        raise ValueError(f"found {kind.name} of {dtype}, which torch cannot compute on the CPU ({error})") from error
    return combine


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
    """`pieces[r]` goes to rank r; what comes for this rank is reduced into `output`."""
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
