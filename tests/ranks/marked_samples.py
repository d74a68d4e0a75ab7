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


class Starved(Model):
    def react(self, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 is full.")


class LateStarved(Model):
    """Its memory ends in the backward, when the gradients of the last layer are there."""

    def react(self, x: Tensor) -> Tensor:
        return _NoBackward.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: object, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(context: object, gradient: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB.")


def data(split: str) -> list[tuple[Tensor, Tensor]] | None:
    if split != "train":
        return None
    inputs = torch.randn(SAMPLES, 7, generator=torch.Generator().manual_seed(1))
    targets = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(2))
    inputs[MARKED, 0] = MARK
    return list(zip(inputs, targets, strict=True))
