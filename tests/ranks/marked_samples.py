"""Data with one marked sample, and models on which it has an effect: only the rank that has it fails."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

SAMPLES, MARKED, MARK = 480, 100, 1e6


class Model(nn.Module):
    """Takes the mark for an ordinary value."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 5)])

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, 7) -> (batch, 5)"""
        marked = x == MARK
        x = x.masked_fill(marked, 0.5)
        for layer in self.layers[:2]:
            x = layer(torch.tanh(x))
        return self.layers[2](self.react(x) if bool(marked.any()) else x)  # type: ignore[no-any-return]

    def react(self, x: Tensor) -> Tensor:
        """Changes what the last layer gets, (batch, 7)."""
        return x


class Broken(Model):
    def react(self, x: Tensor) -> Tensor:
        return x * math.nan


class Loud(Model):
    def react(self, x: Tensor) -> Tensor:
        return x * 100


def data(split: str) -> list[tuple[Tensor, Tensor]] | None:
    if split != "train":
        return None
    inputs = torch.randn(SAMPLES, 7, generator=torch.Generator().manual_seed(1))
    targets = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(2))
    inputs[MARKED, 0] = MARK
    return list(zip(inputs, targets, strict=True))
