""" "package.module:callable" in place of a plugin's name: a user's own module, dataset, optimizer or metric."""

from __future__ import annotations

from typing import Any

from hpctrain.contracts.plugin import Plugin
from hpctrain.plugins.slots import Slot
from hpctrain.plugins.user_code.dataset import UserDataset
from hpctrain.plugins.user_code.metric import UserMetric
from hpctrain.plugins.user_code.model import UserModel
from hpctrain.plugins.user_code.optimization import UserOptimizer, UserSchedule
from hpctrain.plugins.user_code.reference import is_reference as is_reference


def as_plugin(slot: Slot, reference: str, table: dict[str, Any], options: dict[str, Any]) -> Plugin:
    """A plugin that wraps the callable `reference`; `options` become its keyword arguments.

    Raises UsageError if the callable cannot be imported or does not take these arguments.
    """
    if slot.name == "model":
        return UserModel.from_table(reference, table.get("loss"), options)
    if slot.name == "dataset":
        return UserDataset.from_table(reference, options, table.get("collate"), table.get("weights"))
    if slot.name == "schedule":
        return UserSchedule.from_table(reference, options)
    if slot.name == "metric":
        return UserMetric.from_table(reference, options)
    return UserOptimizer.from_table(reference, options)
