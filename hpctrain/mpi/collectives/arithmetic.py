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
        named: Any = op  # the stubs of torch's versions differ
        return _reduction(getattr(named, "op", named).value, dtype, size)  # a ReduceOp may carry a factor

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
    operation = ReduceOp.SUM if kind == ReduceOp.AVG else kind
    if dtype == torch.bool:
        operation = _TRUTH.get(operation, operation)
    one = torch.ones(1, dtype=dtype)
    try:
        reduction = Reduction(_ARITHMETIC[operation], size if kind == ReduceOp.AVG else None)
        reduction([one, one], one.clone(), spare=one.clone())
    except (RuntimeError, KeyError) as error:  # PREMUL_SUM is NCCL's alone
        raise ValueError(f"found {kind.name} of {dtype}, which torch can't compute on the CPU ({error})") from error
    return reduction
