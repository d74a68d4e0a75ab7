"""A convolutional network and its augmented images. Nothing in this file knows hpctrain."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of an image (1, height, width) and a label (), read from an .npz file."""

    def __init__(self, file: str, split: str) -> None:
        arrays = np.load(file)
        self.images = torch.from_numpy(arrays[f"{split}_images"])
        self.labels = torch.from_numpy(arrays[f"{split}_labels"]).long()
        self.augment = split == "train"

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index] / 128 - 1
        if self.augment:
            down, right = torch.randint(-2, 3, (2,)).tolist()
            contrast, brightness = torch.rand(2).tolist()
            image = image.roll((down, right), (0, 1)) * (0.8 + 0.4 * contrast) + 0.2 * (brightness - 0.5)
        return image[None], self.labels[index]


def samples(split: str, file: str) -> Images | None:
    return Images(file, split) if split in ("train", "validation") else None


def block(inputs: int, outputs: int) -> nn.Sequential:
    """GroupNorm, since BatchNorm would compute its means over one rank's images."""
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(conv, nn.GroupNorm(4, outputs), nn.ReLU(), nn.MaxPool2d(2))


def build(width: int) -> nn.Module:
    blocks = block(1, width), block(width, 2 * width), block(2 * width, 4 * width)
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(16 * width, 10))
