"""Keeps activations in host memory between forward and backward. Copies run beside computing, and come back a block ahead."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpctrain.api import Done, SideStream, is_accelerator


@dataclass(eq=False)
class Kept:
    """An activation of an accelerator in host memory."""

    values: Tensor
    device: torch.device
    before: weakref.ref[Kept] | None
    """Set by forward: the activation kept before this one, which backward wants next."""
    back: tuple[Tensor, Done] | None = None
    """The copy on the device again, and the end of the copying."""


class HostMemory:
    """Hooks for `torch.autograd.graph.saved_tensors_hooks`."""

    def __init__(self) -> None:
        self._copies: SideStream | None = None
        self._newest: weakref.ref[Kept] | None = None

    def pack(self, tensor: Tensor) -> Any:
        """An activation in host memory; other tensors (a mask, positions) unchanged."""
        return self.keep(tensor) if tensor.requires_grad else tensor

    def unpack(self, packed: Any) -> Tensor:
        """The activation on its device."""
        return self.bring(packed)

    @torch.no_grad()
    def keep(self, tensor: Tensor) -> Tensor | Kept:
        """The tensor in host memory, where the CPU's are anyway."""
        if not is_accelerator(tensor.device):
            return tensor
        values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with self._stream(tensor.device).entered(tensors=[tensor]):
            values.copy_(tensor, non_blocking=True)
        kept = Kept(values, tensor.device, self._newest)
        self._newest = weakref.ref(kept)
        return kept

    @torch.no_grad()
    def bring(self, kept: Tensor | Kept) -> Tensor:
        """The values on their device; those that backward wants next set off, too."""
        if isinstance(kept, Tensor):
            return kept
        tensor, done = self._fetched(kept)
        kept.back = None  # the graph's until it drops it: with a second backward it comes again
        before = None if kept.before is None else kept.before()
        if before is not None:
            before.back = self._fetched(before)
        done.before_computing([tensor])
        return tensor

    def _fetched(self, kept: Kept) -> tuple[Tensor, Done]:
        if kept.back is not None:
            return kept.back
        copies = self._stream(kept.device)
        with copies.entered(after_computing=False):  # the copies of forward are on this stream, too
            tensor = kept.values.to(kept.device, non_blocking=True)
        return tensor, copies.done()

    def _stream(self, device: torch.device) -> SideStream:
        if self._copies is None:
            self._copies = SideStream(device)
        return self._copies
