"""Keeps activations in host memory between forward and backward. Copies run beside computing, and come back a block ahead."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpctrain.api import Done, SideStream, UsageError, is_accelerator, version_of

# activations whose copies may be on their way while the next block computes
_IN_FLIGHT = 1


@dataclass(eq=False)
class Kept:
    """An activation of an accelerator in host memory."""

    values: Tensor
    device: torch.device
    before: weakref.ref[Kept] | None
    """Set by forward: the activation kept before this one, which backward wants next."""
    back: tuple[Tensor, Done] | None = None
    """The copy on the device again, and the end of the copying."""
    is_back: bool = False
    """Whether backward has had it."""


class HostMemory:
    """Hooks for `torch.autograd.graph.saved_tensors_hooks`: `pack` and `bring`."""

    def __init__(self) -> None:
        self._copies: SideStream | None = None
        self._newest: weakref.ref[Kept] | None = None
        self._leaving: deque[tuple[Tensor, int, Done]] = deque()

    def pack(self, tensor: Tensor) -> Any:
        """An activation in host memory; other tensors (a mask, positions) unchanged."""
        return self.keep(tensor) if tensor.requires_grad else tensor

    @torch.no_grad()
    def keep(self, tensor: Tensor) -> Tensor | Kept:
        """The tensor in host memory, where the CPU's are anyway. Raises UsageError if one before was changed meanwhile."""
        if not is_accelerator(tensor.device):
            return tensor
        values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copies = self._stream(tensor.device)
        with copies.entered():
            values.copy_(tensor, non_blocking=True)
        # Held until its copy is over. A stream of its own that only frees memory later would let all blocks' inputs pile up
        # where the program is ahead of the device.
        self._leaving.append((tensor.detach(), version_of(tensor), copies.done()))
        self._let_go(_IN_FLIGHT)
        kept = Kept(values, tensor.device, self._newest)
        self._newest = weakref.ref(kept)
        return kept

    @torch.no_grad()
    def bring(self, kept: Tensor | Kept) -> Tensor:
        """The values on their device; those that backward wants next set off, too."""
        if isinstance(kept, Tensor):
            return kept
        self._let_go(0)
        tensor, done = self._fetched(kept)
        kept.back, kept.is_back = None, True  # the graph's until it drops it: with a second backward it comes again
        before = _alive(kept.before)
        while before is not None and before.is_back:  # a block's inputs come in the order in which they were kept
            before = _alive(before.before)
        if before is not None:
            before.back = self._fetched(before)
        done.before_computing()
        return tensor

    def _let_go(self, most: int) -> None:
        while len(self._leaving) > most:
            tensor, version, done = self._leaving.popleft()
            done.before_computing()
            if version_of(tensor) != version:
                raise UsageError(
                    "[activation_checkpointing] offload: a block's input was changed in place after the block had it, so what "
                    "is kept of it may be either; write x = x + y in place of x += y, or leave offload out"
                )

    def _fetched(self, kept: Kept) -> tuple[Tensor, Done]:
        if kept.back is not None:
            return kept.back
        tensor, copies = torch.empty_like(kept.values, device=kept.device, pin_memory=False), self._stream(kept.device)
        with copies.entered(tensors=[tensor]):  # after what computes, or a whole backward's would come at once
            tensor.copy_(kept.values, non_blocking=True)
        return tensor, copies.done()

    def _stream(self, device: torch.device) -> SideStream:
        if self._copies is None:
            self._copies = SideStream(device)
        return self._copies


def _alive(kept: weakref.ref[Kept] | None) -> Kept | None:
    return None if kept is None else kept()
