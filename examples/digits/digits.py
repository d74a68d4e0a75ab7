"""A model, a dataset and a loss of one's own: drawn digits, 8 x 8 pixels, shifted and noisy.

cd examples/digits && hpctrain run digits.toml -n 2
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

GLYPHS = [
    "01110100011000110001100010111000000",
    "00100011000010000100001000111000000",
    "01110100010000100110010001111100000",
    "11110000010111000001000011111000000",
    "00010001100101011111000100001000000",
    "11111100001111000001000011111000000",
    "01110100001111010001100010111000000",
    "11111000010001000100010000100000000",
    "01110100010111010001100010111000000",
    "01110100011000101111000010111000000",
]
"""Seven rows of five pixels for each digit."""


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is drawn from (split, i): image (1, 8, 8), label ()."""

    def __init__(self, offset: int, count: int) -> None:
        self.offset, self.count = offset, count
        self.glyphs = torch.tensor([[float(pixel) for pixel in glyph] for glyph in GLYPHS]).view(10, 7, 5)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.offset + index)
        label, row, column = (int(torch.randint(n, (), generator=generator)) for n in (10, 2, 4))
        image = 0.4 * torch.randn(8, 8, generator=generator)
        image[row : row + 7, column : column + 5] += self.glyphs[label]
        return image[None], torch.tensor(label)


def samples(split: str, count: int) -> Digits:
    """What `[dataset] name = "digits:samples"` calls; `count` is a key of its table."""
    return Digits(0, count) if split == "train" else Digits(10**9, count // 10)


def build(width: int) -> nn.Module:
    """What `[model] name = "digits:build"` calls."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * 16, 10),
    )


def loss(outputs: Tensor, target: Tensor) -> Tensor:
    """One loss per row, (batch,): the trainer takes the mean over the global batch, however it is cut."""
    return functional.cross_entropy(outputs, target, reduction="none", label_smoothing=0.05)
