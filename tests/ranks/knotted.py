"""A model of the user's own whose parameters are needed on several ranks of a pipeline, for `[plugins] load`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hpctrain.api import Batch, MetaModel, ModelSpec, PipelineModel, fill_normal, hookimpl


class Layer(nn.Linear):
    """A block."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


class Net(nn.Module):
    """The head comes first, so that the parameter tied to the embedding has the head's name. Two blocks share a parameter.
    `offset` belongs to no module that a pipeline could move."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 7)
        self.embedding = nn.Embedding(7, 6)
        self.embedding.weight = self.head.weight
        self.offset = nn.Parameter(torch.empty(6))
        self.layers = nn.ModuleList(Layer(6, 6) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids).mean(1) + self.offset

    def forward(self, ids: Tensor) -> Tensor:
        """ids: (batch, 3) -> (batch, 7)"""
        h = self.embed(ids)
        for layer in self.layers:
            h = layer(h)
        return self.head(h + self.offset)


class Knotted(MetaModel, PipelineModel):
    """See Net."""

    name = "knotted"

    def build(self) -> nn.Module:
        return Net()

    def initialize(self, name: str, tensor: Tensor, rows: tuple[int, int], seed: int) -> None:
        fill_normal(tensor, 0.5, seed, name, rows)

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        return [layer for layer in module.layers if layer is not None]  # type: ignore[union-attr]

    def ends(self, module: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
        return [m for m in [module.embedding] if m is not None], [m for m in [module.head] if m is not None]  # type: ignore[misc]

    def embed(self, module: nn.Module, batch: Batch) -> Tensor:
        return module.embed(batch[0])  # type: ignore[operator, no-any-return]

    def head(self, module: nn.Module, hidden: Tensor) -> Any:
        return module.head(hidden + module.offset)  # type: ignore[operator]

    def forward(self, module: nn.Module, batch: Batch) -> Any:
        return module(batch[0])

    def count(self, batch: Batch) -> int:
        return len(batch[1])

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        return cross_entropy(outputs, batch[1], reduction="sum")


@hookimpl
def hpctrain_model() -> list[type[ModelSpec]]:
    return [Knotted]
