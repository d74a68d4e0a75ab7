"""Whether an optimizer can update a part of a parameter by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_LR = 0.01
_TOLERANCE = 1e-3
"""Of the largest change; roundings are less than a thousandth of it."""


def updates_parts_alike(build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]) -> bool:
    """Whether what an optimizer does to half of a matrix is that half of what it does to the whole: two steps of random values.

    One that looks at all of a matrix (Muon, LAMB) does something else on each layout. One that can't be tried is trusted.
    """
    values, *gradients = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(0)) * 0.1
    try:
        whole, halves = (_changes(build, values, gradients, count) for count in (1, 2))
    except Exception:  # a third party's may want a GPU, or other shapes
        return True
    return bool((whole - halves).abs().max() <= _TOLERANCE * whole.abs().max())


def _changes(
    build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    values: torch.Tensor,
    gradients: list[torch.Tensor],
    count: int,
) -> torch.Tensor:
    """What two steps change in a matrix that lies in `count` parameters."""
    parts = [nn.Parameter(part.clone()) for part in values.chunk(count)]
    optimizer = build([{"params": parts, "lr": _LR}])
    for gradient in gradients:
        for part, share in zip(parts, gradient.chunk(count), strict=True):
            part.grad = share.clone()
        optimizer.step()
    return torch.cat([part.detach() for part in parts]) - values
