"""A fault that a plugin is planted with."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Fault:
    """A promise that a plugin breaks.

    tables: of the job, besides those of the test. told: a regular expression for what the kit says of it. ranks: the fewest that
    show it.
    """

    plugin: type
    tables: Mapping[str, Any]
    told: str
    ranks: int = 1

    def __str__(self) -> str:
        return self.plugin.__name__


FAULTS: list[Fault] = []
NAMES = itertools.count()


def planted(slot: str, key: str, told: str, ranks: int = 1, **tables: Any) -> Any:
    """Register the class that follows as a plugin of `slot`, which `key` of its table chooses."""

    def register(cls: Any) -> Any:
        cls.name, cls.slot = f"faulty-{next(NAMES)}", slot
        table: Any = {cls.name: 2} if slot == "parallelism" else {key: cls.name, **tables.get(slot, {})}
        of_job = {"parallelism": {"pipeline": {"size": 2, **table}}} if slot == "pipeline_schedule" else {slot: table}
        others = {name: one for name, one in tables.items() if name != slot}
        of_job = {slot: [table]} if slot in ("hook", "metric", "logger") else of_job
        FAULTS.append(Fault(cls, {**others, **of_job}, told, ranks))
        return cls

    return register


def of_slot(slot: str) -> list[type]:
    return [one.plugin for one in FAULTS if one.plugin.slot == slot]


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *inputs):
        return self.inner(*inputs)
