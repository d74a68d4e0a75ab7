"""Trials of an optimizer: whether it updates parameters, and a part of one by itself."""

from __future__ import annotations

import torch
from torch import nn

from hpctrain.contracts.optimization import Optimizer
from hpctrain.model.groups import build_optimizer

_LR = 0.01
_TOLERANCE = 1e-3
"""Relative to the largest change; rounding errors are below a thousandth of it."""


def updates_parameters(plugin: Optimizer) -> bool:
    """Whether two steps on random values change a matrix. If the trial itself fails, the answer is True."""
    values, *gradients = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(0)) * 0.1
    try:
        return bool(_changes(plugin, values, gradients, 1).any())
    except Exception:  # a third party's optimizer may need a GPU, or other shapes
        return True


def updates_parts_alike(plugin: Optimizer) -> bool:
    """Whether an optimizer changes half of a matrix as it changes that half within the whole, in two steps on random values.

    An optimizer that reads the whole matrix (Muon, LAMB) gives another result on each layout. If the trial itself fails,
    the answer is True.
    """
    values, *gradients = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(0)) * 0.1
    try:
        whole, halves = (_changes(plugin, values, gradients, count) for count in (1, 2))
    except Exception:  # a third party's optimizer may need a GPU, or other shapes
        return True
    return bool((whole - halves).abs().max() <= _TOLERANCE * whole.abs().max())


def _changes(
    plugin: Optimizer, values: torch.Tensor, gradients: list[torch.Tensor], count: int
) -> torch.Tensor:
    """The change after two steps of a matrix that is split into `count` parameters."""
    parts = [nn.Parameter(part.clone()) for part in values.chunk(count)]
    optimizer = build_optimizer(plugin, [{"params": parts, "lr": _LR}])
    for gradient in gradients:
        for part, share in zip(parts, gradient.chunk(count), strict=True):
            part.grad = share.clone()
        optimizer.step()
    return torch.cat([part.detach() for part in parts]) - values
