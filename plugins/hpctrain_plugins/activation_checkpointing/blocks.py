"""What is computed again: the model's blocks."""

from __future__ import annotations

from torch import nn

from hpctrain.api import ModelSpec, UsageError


def blocks_of(module: nn.Module, spec: ModelSpec, mode: str) -> list[nn.Module]:
    """Raises UsageError for a model that names none."""
    blocks = spec.blocks(module)
    if not blocks:
        raise UsageError(
            f'[activation_checkpointing] mode = "{mode}": the model {spec.name!r} names no blocks; use mode = "none"',
            everywhere=True,
        )
    return blocks
