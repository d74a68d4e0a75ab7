"""What is computed again: the model's blocks, and what that must not do twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn

from hpctrain.api import ModelSpec, UsageError, buffers_of, version_of


def blocks_of(module: nn.Module, spec: ModelSpec, mode: str) -> list[nn.Module]:
    """Raises UsageError for a model that has none."""
    blocks = spec.blocks(module)
    if not blocks:
        raise UsageError(
            f'[activation_checkpointing] mode = "{mode}": the model {spec.name!r} has no blocks; expected a ModelSpec that '
            "names them or, in a module of your own, an nn.ModuleList or nn.Sequential of several blocks of one class; use "
            'mode = "none"',
            everywhere=True,
        )
    return blocks


class Buffers:
    """The buffers of a block, such as the running statistics of BatchNorm or the vectors of a spectral norm: a forward in
    backward begins with what the first one began with, and leaves them alone."""

    def __init__(self, block: nn.Module):
        self._owners = [module for module in block.modules() if buffers_of(module)]
        self._changing: set[tuple[nn.Module, str]] | None = None
        """Those that a forward is known to change; None before the first one."""

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """One for a forward, one for the same forward in backward: torch.utils.checkpoint's `context_fn`."""
        again = _Again()
        return self._noting(again), again

    @contextmanager
    def _noting(self, again: _Again) -> Iterator[None]:
        known = self._changing
        before = [
            # what is only read, a mask say, is copied once, before anything is known
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
        yield
        for owner, name, buffer, version, value in before:
            # batch and instance norms write their statistics unnoticed by the version counter
            unnoticed = owner.training and getattr(owner, "track_running_stats", False)
            if unnoticed or buffers_of(owner)[name] is not buffer or version_of(buffer) != version:
                again.began_with.append((owner, name, value))
        self._changing = (known or set()) | {(owner, name) for owner, name, _ in again.began_with}


class _Again(AbstractContextManager[None]):
    """What the forward has changed is changed in copies now.

    Entered once for each backward, of which some pipeline schedules have two.
    """

    def __init__(self) -> None:
        self.began_with: list[tuple[nn.Module, str, Tensor]] = []
        self._kept: list[tuple[nn.Module, str, Tensor | None]] = []

    def __enter__(self) -> None:
        self._kept = [(owner, name, buffers_of(owner)[name]) for owner, name, _ in self.began_with]
        for owner, name, value in self.began_with:
            buffers_of(owner)[name] = _copy(value)

    def __exit__(self, *exception: object) -> None:  # torch leaves by one as soon as it has all that it needs
        for owner, name, buffer in self._kept:
            buffers_of(owner)[name] = buffer


def _copy(buffer: Tensor) -> Tensor:
    return buffer.detach().clone()
