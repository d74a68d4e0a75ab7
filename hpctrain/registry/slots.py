"""The slots: for each, its table in the job file, the key that chooses a plugin, its contract and its hook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel

from hpctrain.contracts.activation_checkpointing import ActivationCheckpointing
from hpctrain.contracts.checkpoint import CheckpointFormat
from hpctrain.contracts.communicator import Communicator
from hpctrain.contracts.compression import Compression
from hpctrain.contracts.dataset import Dataset
from hpctrain.contracts.life_cycle import Hook, Profiler
from hpctrain.contracts.logger import Logger
from hpctrain.contracts.metric import Metric
from hpctrain.contracts.model import ModelSpec
from hpctrain.contracts.optimization import Optimizer, Schedule
from hpctrain.contracts.parallelism import Parallelism, PipelineSchedule
from hpctrain.contracts.plugin import Plugin
from hpctrain.contracts.precision import Precision
from hpctrain.contracts.scheduler import Scheduler
from hpctrain.contracts.sharding import Sharding
from hpctrain.job.tables import AxisTable, Job, SchedulerTable


@dataclass(frozen=True)
class Slot:
    """`name` is also the table's name; `key` is None if the table's own keys are the plugins' names."""

    name: str
    key: str | None
    contract: type[Plugin]
    numbered: tuple[str, str] | None = None
    """A key whose number stands for a plugin's name, and the name's prefix before it. Without either key the number is 0."""
    inner: bool = False
    """Whether the slot has no table: an option of another slot's plugin chooses (`Plugin.chooses`)."""
    many: bool = False
    """Whether the job may have any number of its tables, `[[name]]`."""
    takes_user_code: bool = False
    """Whether "package.module:callable" may stand for a plugin's name."""

    @property
    def hook(self) -> str:
        """The registration hook's name."""
        return f"hpctrain_{self.name}"


SLOTS: dict[str, Slot] = {
    slot.name: slot
    for slot in (
        Slot("model", "name", ModelSpec, takes_user_code=True),
        Slot("dataset", "name", Dataset, takes_user_code=True),
        Slot("optimizer", "name", Optimizer, takes_user_code=True),
        Slot("schedule", "name", Schedule, takes_user_code=True),
        Slot("parallelism", None, Parallelism),
        Slot("pipeline_schedule", None, PipelineSchedule, inner=True),
        Slot("sharding", "name", Sharding, numbered=("stage", "zero-")),
        Slot("precision", "mode", Precision),
        Slot("activation_checkpointing", "mode", ActivationCheckpointing),
        Slot("compression", "name", Compression),
        Slot("checkpoint", "format", CheckpointFormat),
        Slot("communicator", "name", Communicator),
        Slot("profile", "name", Profiler),
        Slot("logger", "name", Logger, many=True),
        Slot("hook", "name", Hook, many=True),
        Slot("metric", "name", Metric, many=True, takes_user_code=True),
        Slot("scheduler", None, Scheduler),
    )
}

TABLES = [slot for slot in SLOTS.values() if not slot.inner]
"""The slots that have a table in the job file."""


def table_class(slot: Slot) -> type[BaseModel]:
    """The core's model of a slot's table. A plugin's options can't have these keys."""
    if slot.key is None:
        return AxisTable if slot.name == "parallelism" else SchedulerTable
    annotation = Job.model_fields[slot.name].annotation
    table = get_args(annotation)[0] if slot.many else annotation  # list[LoggerTable]
    assert isinstance(table, type) and issubclass(table, BaseModel)
    return table


def choice_of(slot: Slot, table: Mapping[str, Any]) -> tuple[str, Any]:
    """The key that chooses the plugin of a table, and the plugin's name. It isn't a text where the key is missing or has another
    type; the core's table reports that."""
    assert slot.key is not None
    if slot.numbered is not None and slot.key not in table:
        short, prefix = slot.numbered
        number = table.get(short, 0)
        is_number = isinstance(number, int) and not isinstance(number, bool) and number >= 0
        return short, f"{prefix}{number}" if is_number else None
    field = table_class(slot).model_fields[slot.key]
    return slot.key, table.get(slot.key, None if field.is_required() else field.default)
