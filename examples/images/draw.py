"""Draws images.npz, a stand-in for your own images: digits of 5 x 7 dots, of any brightness, somewhere on a noisy ground.

python draw.py
"""

import numpy as np

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
"""Seven rows of five dots for each digit."""


def draw(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images (count, 16, 16) and labels (count,), as bytes."""
    numbers = np.random.default_rng(seed)
    glyphs = np.array([[float(dot) for dot in glyph] for glyph in GLYPHS]).reshape(10, 7, 5)
    labels = numbers.integers(10, size=count)
    images = numbers.normal(60, 20, (count, 16, 16))
    for image, label in zip(images, labels, strict=True):
        row, column = numbers.integers(2, 8), numbers.integers(2, 10)
        image[row : row + 7, column : column + 5] += numbers.uniform(80, 180) * glyphs[label]
    return images.clip(0, 255).astype(np.uint8), labels.astype(np.uint8)


if __name__ == "__main__":
    train_images, train_labels = draw(6000, seed=1)
    validation_images, validation_labels = draw(1000, seed=2)
    np.savez(
        "images.npz",
        train_images=train_images,
        train_labels=train_labels,
        validation_images=validation_images,
        validation_labels=validation_labels,
    )
