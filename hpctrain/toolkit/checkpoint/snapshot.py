"""Copies of the state that training doesn't change any more."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hpctrain.api import Piece, State, foreach_copy_, is_accelerator
from hpctrain.toolkit.checkpoint import values


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
            self._kept = [Piece(one.name, one.shape, one.offsets, _host_memory(one.tensor)) for one in state.pieces]
        if self._kept:
            foreach_copy_([one.tensor for one in self._kept], [one.tensor.detach() for one in state.pieces])
        return State(self._kept, plain)


def _host_memory(like: Tensor) -> Tensor:
    """Pinned for tensors of an accelerator, which otherwise cannot copy at the full speed of the bus."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=is_accelerator(like.device))


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
