"""Copies of the state that training doesn't change any more."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hpctrain.api import Piece, State, copy_to_host, is_accelerator
from hpctrain.toolkit.checkpoint import values

# bytes: torch takes pinned memory in powers of two, so a tensor that asked for its own could take twice its size
_CHUNK = 2**30
_ALIGNMENT = 64


class Snapshots:
    """Takes one at a time, into memory that is kept for the next: fresh pages would cost more than the copying."""

    def __init__(self) -> None:
        self._kept: list[Piece] = []

    def take(self, state: State) -> State:
        """A copy in host memory, good until the next one is taken. TypeError names a value that can't be saved.

        As long as no form changes it is the same list of pieces each time.
        """
        with collector_waits():
            return self._take(state)

    def _take(self, state: State) -> State:
        plain = values.decode(values.encode(state.values))
        if list(map(_form, state.pieces)) != list(map(_form, self._kept)):
            self._kept = []  # given back before as much is asked for
            memory = _host_memory([one.tensor for one in state.pieces])
            self._kept = [
                Piece(one.name, one.shape, one.offsets, copy) for one, copy in zip(state.pieces, memory, strict=True)
            ]
        if self._kept:
            copy_to_host([one.tensor for one in self._kept], [one.tensor.detach() for one in state.pieces])
        return State(self._kept, plain)


def _host_memory(tensors: list[Tensor]) -> list[Tensor]:
    """Memory for a copy of each tensor, pinned for those of an accelerator: it can't copy to other memory at the bus's speed."""
    pinned = [number for number, one in enumerate(tensors) if is_accelerator(one.device)]
    chunks = _Chunks(sum(_padded(tensors[number]) for number in pinned))
    taken = {number: chunks.take(tensors[number]) for number in sorted(pinned, key=lambda n: -tensors[n].nbytes)}
    return [
        taken[number] if number in taken else torch.empty(one.shape, dtype=one.dtype)
        for number, one in enumerate(tensors)
    ]


class _Chunks:
    """Pinned memory that tensors share, the largest first."""

    def __init__(self, nbytes: int) -> None:
        """nbytes: what all tensors take."""
        self._left, self._free = nbytes, list[Tensor]()

    def take(self, like: Tensor) -> Tensor:
        """Memory of the shape and dtype of a tensor."""
        nbytes = _padded(like)
        place = next((place for place, free in enumerate(self._free) if len(free) >= nbytes), len(self._free))
        if place == len(self._free):
            size = min(_CHUNK, self._left) if nbytes <= _CHUNK else 1 << (nbytes - 1).bit_length()
            self._free.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))
        whole = self._free[place]
        self._free[place] = whole[nbytes:]
        self._left -= nbytes
        return whole[: like.nbytes].view(like.dtype).view(like.shape)


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _form(piece: Piece) -> tuple[object, ...]:
    return piece.name, piece.shape, piece.offsets, piece.tensor.shape, piece.tensor.dtype


@contextmanager
def collector_waits() -> Iterator[None]:
    """No collection within the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
