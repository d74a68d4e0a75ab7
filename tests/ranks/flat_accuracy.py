"""A metric of torchmetrics for outputs (batch, seq, classes)."""

from __future__ import annotations

from typing import Any

from torchmetrics.classification import MulticlassAccuracy


class Micro(MulticlassAccuracy):
    """Over all tokens."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes, average="micro")

    def update(self, outputs: Any, target: Any) -> None:
        super().update(outputs.flatten(0, -2), target.flatten())
