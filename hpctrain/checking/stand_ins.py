"""Stand-ins for a model, dataset or optimizer that can't be made, so that the rest of the job can be checked."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.contracts.model import Batch, PaddedModel, TokenModel
from hpctrain.job.problems import PlacedProblem
from hpctrain.job.reading import Key
from hpctrain.plugins.entry_points import ModuleSource
from hpctrain.plugins.registry import Registered, Registry
from hpctrain.plugins.slots import SLOTS

_HERE = "hpctrain.checking.stand_ins"
_TABLES: dict[str, dict[str, Any]] = {
    "model": {"name": "a stand-in"},
    "dataset": {"name": f"{_HERE}:data"},
    "optimizer": {"name": "torch.optim:SGD", "lr": 1.0},
}
_KEPT = {"model": ("weights",), "optimizer": ("groups",)}
"""The keys whose problems don't depend on the plugin."""
_OF_THE_MODEL: tuple[Key, ...] = (
    ("parallelism",),
    ("activation_checkpointing",),
    ("compile",),
    ("optimizer", "groups"),
    ("batch", "tokens"),
)
"""Keys whose problems depend on the model."""
_TOKENS = 64
"""Tokens per sample where the model would have said it."""


class _Model(TokenModel, PaddedModel):
    """A model that takes any samples."""

    name = "a stand-in"
    vocab_size = 2**62
    max_seq_length = 2**62

    def build(self) -> nn.Module:
        return nn.Linear(1, 1)

    def forward(self, module: nn.Module, batch: Batch) -> Any:
        return module(batch)

    def count(self, batch: Batch) -> int:
        return 1

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        return torch.as_tensor(outputs)

    def padding(self) -> Mapping[str, float]:
        return {}


def register_stand_in(registry: Registry) -> None:
    """Add the stand-in for models."""
    registry.entries["model", _Model.name] = Registered(SLOTS["model"], _Model, ModuleSource(_HERE))


def data(split: str) -> list[None]:
    """Samples that no model takes."""
    return [None]


def with_stand_in(tables: dict[str, Any], key: Key, registry: Registry) -> list[dict[str, Any]]:
    """The tables with another plugin in place of what is wrong at `key`: the one with the most similar name, then a stand-in."""
    if not has_stand_in(key):
        return []
    slot = str(key[0])
    table, changed = tables.get(slot), []
    if isinstance(table, dict) and key[1:] == ("name",) and isinstance(table.get("name"), str):
        near = difflib.get_close_matches(table["name"], registry.names(slot), n=1)
        changed += [{**tables, slot: {**table, "name": name}} for name in near]
    kept = {name: table[name] for name in _KEPT.get(slot, ()) if name in table} if isinstance(table, dict) else {}
    if "groups" in kept:
        rows = kept["groups"] if isinstance(kept["groups"], list) else []
        kept["groups"] = [{"pattern": row["pattern"]} for row in rows if isinstance(row, dict) and "pattern" in row]
    stand_in = {**tables, slot: {**kept, **_TABLES[slot]}}
    if slot == "model" and isinstance(tables.get("dataset"), dict):
        stand_in["dataset"] = {"seq_length": _TOKENS, **tables["dataset"]}
    return [*changed, stand_in]


def has_stand_in(key: Key) -> bool:
    """Whether `with_stand_in` replaces what is wrong at `key`."""
    return key[:1] in [(slot,) for slot in _TABLES] and key[1:] in ((), ("name",))


def is_caused(problem: PlacedProblem, tables: dict[str, Any]) -> bool:
    """Whether the problem comes from a stand-in in `tables`."""
    used = [slot for slot, table in _TABLES.items() if tables.get(slot, {}).get("name") == table["name"]]
    key = problem.key
    if key and key[0] in used:
        return key[1:2] not in [(name,) for name in _KEPT.get(str(key[0]), ())]
    return any(str(_TABLES[slot]["name"]) in problem.message for slot in used) or (
        "model" in used and any(key[: len(one)] == one for one in _OF_THE_MODEL)
    )
