"""Looks behind a job's first problems: with stand-ins for the wrong values, the rest of the job can be checked, too."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.base.errors import HpctrainError
from hpctrain.contracts.model import Batch, PaddedModel, TokenModel
from hpctrain.job.problems import JobError, PlacedProblem
from hpctrain.job.raw import Key, RawJob
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


_STAND_INS: tuple[Any, ...] = (None, 1, "x", ["x"])
"""Values that replace a wrong one, in this order; None removes the key, so that its default holds."""

Check = Callable[[RawJob], object]


def further_problems(
    raw: RawJob, found: Sequence[PlacedProblem], first: Check, rest: Check, registry: Registry
) -> list[PlacedProblem]:
    """The problems behind `found` in the same job. Empty if a wrong value has no stand-in.

    first, rest: raise JobError; `first` with the problems of single values only.
    """
    bad = list(dict.fromkeys(_replaced(problem.lacks or problem.key) for problem in found))
    tables = raw.tables
    for key in sorted(
        bad, key=str, reverse=True
    ):  # rows of lists from the last one, so that the others keep their places
        candidates = [*_repairs(tables, key), *with_stand_in(tables, key, registry)]
        repaired = next((one for one in candidates if not _is_wrong(one, key, first)), None)
        if repaired is None:
            return []
        tables = repaired
    about = [key[:1] if _is_row(key) else key for key in bad if not has_stand_in(key)]
    return [
        one
        for one in _problems(tables, rest)
        if not is_caused(one, tables) and not any(_is_within(one.key, key) for key in about)
    ]


def _is_row(key: Key) -> bool:
    """Whether it is in a list of tables."""
    return len(key) > 1 and isinstance(key[1], int)


def _replaced(key: Key) -> Key:
    """The key that a stand-in replaces: a row of a list of tables as a whole."""
    return key[:2] if _is_row(key) else key


def _is_within(key: Key, other: Key) -> bool:
    """Whether one of both is the other one or a part of it."""
    return key[: len(other)] == other or other[: len(key)] == key


def _repairs(tables: dict[str, Any], key: Key) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for value in _STAND_INS if key else ():  # a problem of the whole job has no stand-in
        changed = copy.deepcopy(tables)
        inner: Any = changed
        for part in key[:-1]:
            inner = inner.get(part) if isinstance(inner, dict) else None
        if not isinstance(inner, (dict, list)):
            return []
        if value is not None:
            inner[key[-1]] = value  # type: ignore[index]
        elif isinstance(inner, list) or key[-1] in inner:
            del inner[key[-1]]  # type: ignore[arg-type]
        else:
            continue  # a key that is missing
        found.append(changed)
    return found


def _is_wrong(tables: dict[str, Any], key: Key, first: Check) -> bool:
    return any(_is_within(problem.lacks or problem.key, key) for problem in _problems(tables, first))


def _problems(tables: dict[str, Any], check: Check) -> list[PlacedProblem]:
    try:
        check(RawJob(tables, {}, ""))
    except JobError as error:
        return error.problems
    except HpctrainError:
        pass  # of a plugin that a stand-in has led astray
    return []
