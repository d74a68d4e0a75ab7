"""What is computed again: the model's blocks, and what that must not do twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn

from hpctrain.api import ModelSpec, UsageError


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
    """The buffers of a block, such as the running statistics of BatchNorm: a forward in backward leaves them alone."""

    def __init__(self, block: nn.Module):
        self._owners = [module for module in block.modules() if module._buffers]

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """One for a forward, one for the same forward in backward: torch.utils.checkpoint's `context_fn`."""
        again = _Again()
        return self._noting(again.changed), again

    @contextmanager
    def _noting(self, changed: list[tuple[nn.Module, str]]) -> Iterator[None]:
        before = [
            (owner, name, buffer, buffer._version)
            for owner in self._owners
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        yield
        for owner, name, buffer, version in before:
            # batch and instance norms write their statistics unnoticed by the version counter
            unnoticed = owner.training and getattr(owner, "track_running_stats", False)
            if unnoticed or owner._buffers[name] is not buffer or buffer._version != version:
                changed.append((owner, name))


class _Again(AbstractContextManager[None]):
    """What the forward has changed is changed in copies now; what it only read, a mask say, is not copied.

    Entered once for each backward, of which some pipeline schedules have two.
    """

    def __init__(self) -> None:
        self.changed: list[tuple[nn.Module, str]] = []
        self._kept: list[tuple[nn.Module, str, Tensor | None]] = []

    def __enter__(self) -> None:
        self._kept = [(owner, name, owner._buffers[name]) for owner, name in self.changed]
        for owner, name, buffer in self._kept:
            owner._buffers[name] = None if buffer is None else buffer.detach().clone()

    def __exit__(self, *exception: object) -> None:  # torch leaves by one as soon as it has all that it needs
        for owner, name, buffer in self._kept:
            owner._buffers[name] = buffer
