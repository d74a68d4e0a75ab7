"""Copies of the state that training no longer changes."""

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
        """A copy in host memory, valid until the next one is taken. TypeError names a value that can't be saved.

        It is the same list of pieces each time, as long as no piece changes its form.
        """
        with collector_waits():
            plain = values.decode(values.encode(state.values))  # a copy: the state's values may change
            if list(map(_form, state.pieces)) != list(map(_form, self._kept)):
                self._kept = []  # freed before the new memory is asked for
                memory = _host_memory([piece.tensor for piece in state.pieces])
                self._kept = [
                    Piece(piece.name, piece.shape, piece.offsets, copy)
                    for piece, copy in zip(state.pieces, memory, strict=True)
                ]
            if self._kept:
                copy_to_host([copy.tensor for copy in self._kept], [piece.tensor.detach() for piece in state.pieces])
            return State(self._kept, plain)


def _host_memory(tensors: list[Tensor]) -> list[Tensor]:
    """Memory for a copy of each tensor, pinned for those of an accelerator: it can't copy to other memory at the bus's speed."""
    pinned = [number for number, tensor in enumerate(tensors) if is_accelerator(tensor.device)]
    copies, chunks, left = dict[int, Tensor](), list[Tensor](), sum(_padded(tensors[number]) for number in pinned)
    for number in sorted(pinned, key=lambda number: -tensors[number].nbytes):  # small ones fill the rests of chunks
        tensor, nbytes = tensors[number], _padded(tensors[number])
        place = next((place for place, rest in enumerate(chunks) if len(rest) >= nbytes), len(chunks))
        if place == len(chunks):
            size = min(_CHUNK, left) if nbytes <= _CHUNK else 1 << (nbytes - 1).bit_length()
            chunks.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))
        copies[number] = chunks[place][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        chunks[place], left = chunks[place][nbytes:], left - nbytes
    return [copies[n] if n in copies else torch.empty(t.shape, dtype=t.dtype) for n, t in enumerate(tensors)]


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _form(piece: Piece) -> tuple[object, ...]:
    return piece.name, piece.shape, piece.offsets, piece.tensor.shape, piece.tensor.dtype


@contextmanager
def collector_waits() -> Iterator[None]:
    """Run no garbage collection within the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
