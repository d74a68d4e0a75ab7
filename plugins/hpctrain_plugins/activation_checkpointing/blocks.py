"""Finds the blocks to recompute, and keeps a second forward from changing buffers twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from hpctrain.api import ModelSpec, UsageError, buffers_of, version_of

FULL = '[activation_checkpointing] mode = "full"'
"""The advice of the other modes where memory is lacking."""


def blocks_of(module: nn.Module, spec: ModelSpec, mode: str) -> list[nn.Module]:
    """The blocks of the model. Raises UsageError if it has none."""
    blocks = spec.blocks(module)
    if not blocks:
        raise UsageError(
            f'[activation_checkpointing] mode = "{mode}": the model {spec.name!r} has no blocks; expected a ModelSpec that '
            "names them or, in a module of your own, an nn.ModuleList or nn.Sequential of several blocks of one class; use "
            'mode = "none"'
        )
    return blocks


class BlockBuffers:
    """The buffers of a block, such as the running statistics of BatchNorm or the vectors of a spectral norm.

    The recomputation starts with the values that the first forward started with, and leaves the buffers unchanged.
    """

    def __init__(self, block: nn.Module):
        self._owners = [module for module in block.modules() if buffers_of(module)]
        # the buffers that a forward changes; None before the first forward
        self._changing: set[tuple[nn.Module, str]] | None = None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The `context_fn` of torch.utils.checkpoint: contexts for a forward, and for its recomputation."""
        again = _Again()
        return self._noting(again), again

    @contextmanager
    def _noting(self, again: _Again) -> Iterator[None]:
        known = self._changing
        before = [
            # the first forward copies every buffer; later ones skip those that are only read, such as masks
            (
                owner,
                name,
                buffer,
                version_of(buffer),
                _copy(buffer) if known is None or (owner, name) in known else buffer,
            )
            for owner in self._owners
            for name, buffer in buffers_of(owner).items()
            if buffer is not None
        ]
        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a kept cast of a weight would outlive the block, which casts it again
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(caches)
        for owner, name, buffer, version, value in before:
            # batch and instance norms write their statistics without the version counter
            unnoticed = owner.training and getattr(owner, "track_running_stats", False)
            if unnoticed or buffers_of(owner)[name] is not buffer or version_of(buffer) != version:
                again.began_with.append((owner, name, value))
        self._changing = (known or set()) | {(owner, name) for owner, name, _ in again.began_with}


class _Again(AbstractContextManager[None]):
    """Redirects changes of buffers to copies.

    Entered once per backward; some pipeline schedules run two.
    """

    def __init__(self) -> None:
        self.began_with: list[tuple[nn.Module, str, Tensor]] = []
        self._kept: list[tuple[nn.Module, str, Tensor | None]] = []

    def __enter__(self) -> None:
        self._kept = [(owner, name, buffers_of(owner)[name]) for owner, name, _ in self.began_with]
        for owner, name, value in self.began_with:
            buffers_of(owner)[name] = _copy(value)

    def __exit__(self, *exception: object) -> None:  # torch leaves by an exception as soon as it has all it needs
        for owner, name, buffer in self._kept:
            buffers_of(owner)[name] = buffer


def _copy(buffer: Tensor) -> Tensor:
    return buffer.detach().clone()
