"""The arithmetic of reductions: torch adds element by element in rank order, 0, then 1, then 2, and so on.

So a sum has the same bits on all ranks, whatever the message size, the bucket or the MPI library. bf16 and fp16 travel
as 16 bits, are added in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from hpctrain.mpi.transfer.buffers import same_memory

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
# Booleans saturate: one true makes the sum true, one false makes the product false.
_TRUTH = {ReduceOp.SUM: ReduceOp.BOR, ReduceOp.PRODUCT: ReduceOp.BAND}
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Reduction:
    """How elements of a dtype are combined. divisor: divides the sum last (AVG)."""

    combine: _Combine
    divisor: int | None = None

    @staticmethod
    def of(op: ReduceOp | ReduceOp.RedOpType, dtype: torch.dtype, size: int) -> Reduction:
        """The reduction that torch's `op` means for `dtype` in a group of `size` ranks.

        Raises ValueError if `op` is not defined for `dtype`.
        """
        return _reduction(kind_of(op).value, dtype, size)

    def __call__(self, pieces: Sequence[Tensor], output: Tensor, spare: Tensor) -> None:
        """Combine the pieces, (elements,) each, of all ranks in rank order into `output`.

        `output` may be the same memory as one of the pieces. spare: memory for the running total. It must not overlap the
        third and later pieces; it may be `output` if that overlaps no piece.
        """
        if output.dtype in _HALF:
            total = pieces[0].float()
            for piece in pieces[1:]:
                self.combine(total, piece.float(), total)
            if self.divisor is not None:
                total.div_(self.divisor)
            output.copy_(total)
            return
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


@cache  # keyed by the number: hashing torch's enum takes longer than the rest
def _reduction(number: int, dtype: torch.dtype, size: int) -> Reduction:
    kind = ReduceOp.RedOpType(number)
    return Reduction(_arithmetic(kind, dtype), size if kind == ReduceOp.AVG else None)


def kind_of(op: ReduceOp | ReduceOp.RedOpType) -> ReduceOp.RedOpType:
    """The operation of a ReduceOp, without the factor that it may carry."""
    named: Any = op  # the stubs of torch's versions differ
    kind: ReduceOp.RedOpType = getattr(named, "op", named)
    return kind


def _arithmetic(kind: ReduceOp.RedOpType, dtype: torch.dtype) -> _Combine:
    if dtype.is_floating_point and dtype.itemsize == 1:
        raise ValueError(f"found a reduction of {dtype}, expected a wider type: 8-bit floats have no arithmetic")
    fractional = dtype.is_floating_point or dtype.is_complex
    if kind in _BITWISE and fractional:
        raise ValueError(f"found {kind.name} of {dtype}, expected an integer or bool tensor")
    if kind == ReduceOp.AVG and not fractional:
        raise ValueError(f"found {kind.name} of {dtype}, expected a floating-point tensor; use SUM and divide")
    if kind == ReduceOp.PREMUL_SUM:
        raise ValueError("found PREMUL_SUM, which only NCCL has; multiply before a SUM")
    if dtype.is_complex and kind not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ValueError(f"found {kind.name} of {dtype}, expected SUM or AVG for complex tensors")
    if kind == ReduceOp.AVG:
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
