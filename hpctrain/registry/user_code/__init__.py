""" "package.module:callable" in place of a plugin's name: a user's own module, dataset, optimizer or metric."""

from __future__ import annotations

from typing import Any

from hpctrain.contracts.plugin import Plugin
from hpctrain.registry.slots import Slot
from hpctrain.registry.user_code.reference import is_reference as is_reference


def as_plugin(slot: Slot, reference: str, table: dict[str, Any], options: dict[str, Any]) -> Plugin:
    """A plugin that wraps the callable `reference`; `options` become its keyword arguments.

    Raises UsageError if the callable cannot be imported or does not take these arguments. Imports what the slot needs.
    """
    if slot.name == "model":
        from hpctrain.registry.user_code.model import UserModel

        return UserModel.from_table(reference, table.get("loss"), options)
    if slot.name == "dataset":
        from hpctrain.registry.user_code.dataset import UserDataset

        return UserDataset(reference, options, table.get("collate"), table.get("weights"))
    if slot.name == "metric":
        from hpctrain.registry.user_code.metric import UserMetric

        return UserMetric(reference, options)
    from hpctrain.registry.user_code.optimization import UserOptimizer, UserSchedule

    return UserSchedule(reference, options) if slot.name == "schedule" else UserOptimizer.from_table(reference, options)
