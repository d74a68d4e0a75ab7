"""Digits drawn with noise, and a small CNN: what train.py and job.toml share."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

FONT = "757 262 717 717 557 747 747 711 777 757 5 2 1 1 5 6 6 1 2 5"  # rows of 3 bits: three of each digit, then its fourth


def digits(count: int, seed: int) -> TensorDataset:
    """Images (count, 1, 12, 12) and their labels."""
    draw = torch.Generator().manual_seed(seed)
    strokes = [[int(c) for c in word] for word in FONT.split()]
    bits = [[[row >> 2 & 1, row >> 1 & 1, row & 1] for row in strokes[n] + strokes[n + 10]] for n in range(10)]
    shapes = nn.functional.interpolate(torch.tensor(bits, dtype=torch.float32).unsqueeze(1), size=(8, 6))
    labels = torch.randint(0, 10, (count,), generator=draw)
    images = 0.35 * torch.randn(count, 1, 12, 12, generator=draw)
    for image, label in zip(images, labels, strict=True):
        top, left = torch.randint(0, 5, (2,), generator=draw).tolist()
        image[:, top : top + 8, left : left + 6] += shapes[label]
    return TensorDataset(images, labels)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 16, 3, padding=1)
        self.last = nn.Linear(16 * 3 * 3, 10)

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.first(x)), 2)
        x = nn.functional.max_pool2d(torch.relu(self.second(x)), 2)
        return self.last(x.flatten(1))


def samples(split):
    """What a job file asks for: the data of a split, or None."""
    sizes = {"train": (1920, 1), "validation": (480, 2)}
    return digits(*sizes[split]) if split in sizes else None
