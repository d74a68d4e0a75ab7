"""The jobs of the kit: small enough for milliseconds, odd enough to show what breaks in silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.api import Plugin
from hpctrain.data.order import SampleOrder
from hpctrain.registry.slots import SLOTS
from hpctrain_tools.testing.runs import MIDDLE, STEPS

VOCABULARY, LENGTH = 61, 8
"""No number of ranks divides the vocabulary."""

JOB: dict[str, Any] = {
    "job": {"name": "kit", "steps": STEPS, "seed": 5},
    "model": {
        "name": "gpt", "hidden_size": 20, "layers": 4, "attention_heads": 2, "vocab_size": VOCABULARY, "max_seq_length": LENGTH,
    },
    "dataset": {"name": f"{__name__}:rows"},
    "optimizer": {"name": "sgd", "lr": 0.3, "momentum": 0.9, "clip_norm": 0.5},
    "batch": {"global_size": 12, "micro_size": 2},
    "evaluation": {"every_steps": 3},
    "checkpoint": {"every_steps": MIDDLE, "keep": 9},
    "precision": {"mode": "fp32"},
}  # fmt: skip
"""SGD, since AdamW hides a gradient that is scaled; the clipping binds in some steps."""
ODD: dict[str, Any] = {"model": {"name": f"{__name__}:Odd", "loss": f"{__name__}:loss_of_rows"}}
"""Tables of a model with tied, frozen and unused parameters, dropout and a buffer that a forward changes."""
STEADY = {"model": {**ODD["model"], "dropout": 0.0}}
"""The same without dropout, which draws other numbers where an axis cuts samples."""
SPIKING: dict[str, Any] = {
    "model": {"name": f"{__name__}:Odd", "loss": f"{__name__}:spiking_loss"},
    "guard": {"non_finite": "skip"},
}
"""Tables of a model of which a gradient on one rank is infinite in some steps, which are left out."""
STUMBLING: dict[str, Any] = {
    "model": {"name": f"{__name__}:Odd", "loss": f"{__name__}:stumbling_loss"},
    "dataset": {"name": f"{__name__}:ordered"},
    "guard": {"non_finite": "rollback"},
    "checkpoint": {"every_steps": MIDDLE},
}
"""Tables of a run that goes back from step 6 to step 4, and on with the rows that follow."""
STEADFAST = {**STUMBLING, "dataset": {**STUMBLING["dataset"], "leaves_out": True}}
"""The same without the rows that it went back over."""
# options by slot that a plugin gets if it has them
_USUAL: dict[str, dict[str, Any]] = {
    "model": {key: value for key, value in JOB["model"].items() if key != "name"},
    "dataset": {"samples": 60, "validation_samples": 13},
    "optimizer": {"lr": 0.05},
    "profile": {"wait": 1, "record": 2},
}


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Tokens of which some have no label: samples count differently, and some count nothing."""

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 * self._seed + index)
        ids = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=generator)
        labels = ids[1:].clone()
        labels[: index % (LENGTH + 1)] = -100
        return {"input_ids": ids[:-1], "labels": labels}


def rows(split: str) -> Rows | None:
    """The data of the kit. 13 samples to evaluate: ranks have unlike numbers of them."""
    return {"train": Rows(60, 1), "validation": Rows(13, 2)}.get(split)


class Ordered(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows that a run reads in their order. Those of steps 5 and 6 are left out, or one of step 6 makes gradients infinite."""

    def __init__(self, leaves_out: bool) -> None:
        self._rows, self._leaves_out = Rows(12 * (STEPS + 4), 3), leaves_out
        order = SampleOrder(len(self._rows), JOB["job"]["seed"], self.fingerprint()).at(0, len(self._rows))
        self._places = {int(index): place for place, index in enumerate(order)}

    def fingerprint(self) -> str:
        """The same for both: they are read in one order."""
        return "rows in order"

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        place, size = self._places[index], int(JOB["batch"]["global_size"])
        if self._leaves_out and place >= MIDDLE * size:
            place = (place + 2 * size) % len(self._rows)
        row = self._rows[place]
        if place == (MIDDLE + 1) * size + 1:
            row["labels"] = torch.zeros_like(row["labels"])
        return row


def ordered(split: str, leaves_out: bool = False) -> Ordered | Rows | None:
    """The data of a run that goes back to a checkpoint."""
    return Ordered(leaves_out) if split == "train" else rows(split)


class _Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(width, width), nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.dropout = nn.Dropout(dropout)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        found: Tensor = hidden + self.scale.to(hidden.dtype) * self.dropout(torch.tanh(self.inner(hidden)))
        return found


class Odd(nn.Module):
    """A language model with whatever models have."""

    def __init__(self, width: int = 12, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(_Block(width, dropout) for _ in range(3))
        self.frozen, self.unused = nn.Linear(width, width), nn.Linear(3, 5)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        found: Tensor = self.head(hidden + self.frozen(hidden))
        return found


def loss_of_rows(outputs: Tensor, labels: Tensor) -> Tensor:
    """The loss of each row, `(rows,)`."""
    losses = nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view_as(labels).sum(1) / LENGTH


class _Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float("inf")


def spiking_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Losses of `loss_of_rows`, with an infinite gradient of one row in sixty: of one rank, in some steps."""
    losses = loss_of_rows(outputs, labels)
    is_first = (labels[:, -1] == _first_label()) & (labels[:, 0] != -100)
    return torch.where(is_first, _Spike.apply(losses), losses) if is_first.any() else losses  # type: ignore[no-untyped-call]


def stumbling_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Losses of `loss_of_rows`, with an infinite gradient of rows whose labels are zeros."""
    losses, is_marked = loss_of_rows(outputs, labels), labels.eq(0).all(1)
    return torch.where(is_marked, _Spike.apply(losses), losses) if is_marked.any() else losses  # type: ignore[no-untyped-call]


def _first_label() -> int:
    return int(Rows(1, 1)[0]["labels"][-1])


def usual_options(slot: str, plugin: type[Plugin]) -> dict[str, Any]:
    """The options that the kit's job gives a plugin, if it has them."""
    return {key: value for key, value in _USUAL.get(slot, {}).items() if key in plugin.Options.model_fields}


def placed(slot: str, plugin: type[Plugin], options: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a job that chooses the plugin, with its usual options and `options`."""
    table = {**usual_options(slot, plugin), **options}
    if slot == "parallelism":
        return {slot: {plugin.name: {"size": 2, **table} if table else 2}}
    if slot == "pipeline_schedule":
        return {"parallelism": {"pipeline": {"size": 2, "schedule": plugin.name}}}
    chosen = {str(SLOTS[slot].key): plugin.name, **table}
    return {slot: [chosen] if SLOTS[slot].many else chosen}
