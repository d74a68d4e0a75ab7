"""A data set with augmentation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Drawn:
    """Rows that are disturbed each time."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        clean = torch.arange(6.0) * (index % 3 - 1)
        return clean + torch.randn(6), torch.tensor(index % 3)


def samples(split: str) -> Any:
    return Drawn() if split == "train" else None


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


def alike(split: str) -> Any:
    """The same row at each index."""
    return [(torch.arange(6.0), torch.tensor(1))] * 96 if split == "train" else None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dropout = nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.inner(x))


def dropping() -> nn.Module:
    return nn.Sequential(Block(), Block(), Block(), Block(), nn.Linear(6, 3))
