""" "package.module:callable" in place of a plugin's name: a user's own module, dataset or optimizer."""

from __future__ import annotations

from typing import Any

from hpctrain.contracts.plugin import Plugin
from hpctrain.foreign.dataset import ForeignDataset
from hpctrain.foreign.model import ForeignModel
from hpctrain.foreign.optimizer import ForeignOptimizer
from hpctrain.foreign.reference import is_reference
from hpctrain.plugins.slots import Slot

__all__ = ["as_plugin", "is_reference"]


def as_plugin(slot: Slot, reference: str, table: dict[str, Any], options: dict[str, Any]) -> Plugin:
    """The plugin that stands for `reference`; `options` become the callable's keyword arguments.

    Raises UsageError when it cannot be imported or does not take these arguments.
    """
    if slot.name == "model":
        return ForeignModel.from_table(reference, table.get("loss"), options)
    if slot.name == "dataset":
        return ForeignDataset.from_table(reference, options)
    return ForeignOptimizer.from_table(reference, options)
