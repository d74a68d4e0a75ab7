"""A rank's announcement of a collective operation. The ranks compare them to check that all called the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

NAMES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "allocate",
)
_DTYPES = tuple(dict.fromkeys(sorted((v for v in vars(torch).values() if isinstance(v, torch.dtype)), key=str)))
_SIZE_BITS = 47
_NAME_NUMBERS = {name: number for number, name in enumerate(NAMES)}
_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}


@dataclass(slots=True)
class Operation:
    """A collective operation of a group.

    nbytes: this rank's input. agreed_bytes: a size that must be equal on all ranks; 0 if it may differ.
    meet_first: all ranks exchange a description before any data moves, whatever the size. This distinguishes a mistake
    from a slow rank and lets a rank sleep until the others are there.
    """

    name: str
    nbytes: int
    agreed_bytes: int
    dtype: torch.dtype
    meet_first: bool
    timeout: float

    @property
    def description(self) -> int:
        """Name, dtype and agreed size in one 63-bit number."""
        kind = _NAME_NUMBERS[self.name] << 8 | _DTYPE_NUMBERS[self.dtype]
        return kind << _SIZE_BITS | self.agreed_bytes

    @property
    def told(self) -> str:
        """The operation in messages."""
        return f"{self.name} of {self.nbytes} bytes, {str(self.dtype).removeprefix('torch.')}"


def describe(description: int) -> str:
    """Operation.description in words."""
    kind, nbytes = description >> _SIZE_BITS, description & (1 << _SIZE_BITS) - 1
    dtype = str(_DTYPES[kind & 255]).removeprefix("torch.")
    return f"{NAMES[kind >> 8]}({dtype}{f', {nbytes} bytes' if nbytes else ''})"


def disagreement(descriptions: Sequence[int], ranks: Sequence[int]) -> str:
    """The differing calls, by rank."""
    return ", ".join(f"rank {rank} {describe(d)}" for rank, d in zip(ranks, descriptions, strict=True))
