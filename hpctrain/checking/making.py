"""Makes the plugins of a job from its tables, and collects what is wrong with names and options."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from pydantic import BaseModel, ValidationError

from hpctrain.base.errors import EXIT_TRAINING, HpctrainError
from hpctrain.contracts.plugin import Options
from hpctrain.job.problems import PlacedProblem, inner_table, keys_below, problems_of, validate
from hpctrain.job.raw import RawJob, dotted
from hpctrain.job.tables import ParameterGroup
from hpctrain.job.toml import Key
from hpctrain.registry.blame import raised_in
from hpctrain.registry.registry import Registry
from hpctrain.registry.slots import SLOTS, TABLES, Slot, choice_of, table_class
from hpctrain.registry.user_code import as_plugin, is_reference


class PartsMaker:
    """Makes the plugin of every slot from the raw tables, collecting problems instead of stopping at the first."""

    def __init__(self, raw: RawJob, registry: Registry, problems: list[PlacedProblem]) -> None:
        self.raw, self.registry, self.problems = raw, registry, problems

    def make_all(self) -> dict[str, Any]:
        """The plugins by the fields of `Parts`; None for one that can't be made. Tables of a wrong type are left out: the core's
        model reports them."""
        plugins: dict[str, Any] = {}
        for slot in TABLES:
            table = self.raw.tables.get(slot.name)
            if slot.many:
                rows = table if isinstance(table, list) else []
                plugins[f"{slot.name}s"] = [self._table(slot, row, (slot.name, i)) for i, row in enumerate(rows)]
            elif slot.name == "parallelism":
                plugins["parallelism"] = self._parallelism(slot, table if isinstance(table, dict) else {})
            elif slot.key is None:
                tables = table.items() if isinstance(table, dict) else ()
                inner = [(name, own) for name, own in tables if isinstance(own, dict)]
                plugins[slot.name] = {name: self._plugin(slot, name, own, (slot.name, name)) for name, own in inner}
            elif table is None or isinstance(table, dict):
                plugins[slot.name] = self._table(slot, table or {}, (slot.name,))
        plugins["optimizer_groups"] = self._groups(plugins.get("optimizer"))
        return plugins

    def _parallelism(self, slot: Slot, table: dict[str, Any]) -> dict[str, Any]:
        axes = {name: value if isinstance(value, dict) else {"size": value} for name, value in table.items()}
        further = {k: v for k, v in axes.pop("replicate", {}).items() if k != "size"}
        # replicate is the core's own axis: no plugin has it, and it takes no option
        self._options(Options, further, (slot.name, "replicate"), ["size"])
        plugins = {name: self._plugin(slot, name, value, (slot.name, name)) for name, value in axes.items()}
        return {name: plugin for name, plugin in plugins.items() if axes[name].get("size") != 1}  # 1 cuts nothing

    def _table(self, slot: Slot, table: Any, key: Key) -> Any:
        """The plugin that a table chooses; None for a table that the core's model refuses."""
        if not isinstance(table, dict):
            return None
        chosen_by, name = choice_of(slot, table)
        return self._plugin(slot, name, table, key, chosen_by) if isinstance(name, str) else None

    def _plugin(
        self,
        slot: Slot,
        name: str,
        table: dict[str, Any],
        key: Key,
        chosen_by: str | None = None,
        own: Collection[str] | None = None,
    ) -> Any:
        """The plugin `name` with the options in its table, which lies at `key`; None after a problem. own: keys of the table that
        are no options (default: those of the core)."""
        own = table_class(slot).model_fields if own is None else own
        options = {k: v for k, v in table.items() if k not in own}
        chooser = (*key, chosen_by) if chosen_by else key  # an axis's name is its key
        try:
            if slot.takes_user_code and is_reference(name):
                return as_plugin(slot, name, table, options)
            cls: Any = self.registry.find(slot.name, name).cls
        except HpctrainError as error:
            self.problems.append(PlacedProblem.at(chooser, str(error), error.exit_code))
            return None
        validated = self._options(cls.Options, options, key, list(own), lambda k: self._owners(slot, k))
        if validated is None:
            return None
        held = self._held(cls, options, key)
        if held is None or not self._are_known(cls, validated, key):
            return None
        try:
            return self.registry.make(cls, validated, held)
        except HpctrainError as error:
            self.problems.append(PlacedProblem(chooser, f"{dotted(chooser)} = {name!r}: {error}", error.exit_code))
        except Exception as error:  # a third party's code: the report names it
            why = raised_in(error, self.registry)
            self.problems.append(PlacedProblem(chooser, f"{dotted(chooser)} = {name!r}: {why}", EXIT_TRAINING))
        return None

    def _held(self, cls: Any, options: dict[str, Any], key: Key) -> dict[str, dict[str, Any]] | None:
        """The plugins that valid options hold; None where one of them can't be made."""
        held: dict[str, dict[str, Any]] = {option: {} for option in cls.holds}
        for option, name in cls.holds.items():
            own, slot = inner_table(cls.Options, option).model_fields, SLOTS[name]
            for place, table in options.get(option, {}).items():
                held[option][place] = self._plugin(slot, table["name"], table, (*key, option, place), "name", own=own)
        return None if any(plugin is None for plugins in held.values() for plugin in plugins.values()) else held

    def _are_known(self, cls: Any, options: BaseModel, key: Key) -> bool:
        """Whether the plugins that options name exist."""
        for option, slot in cls.chooses.items():
            try:
                self.registry.find(slot, getattr(options, option))
            except HpctrainError as error:
                self.problems.append(PlacedProblem.at((*key, option), str(error), error.exit_code))
                return False
        return True

    def _owners(self, slot: Slot, option: str) -> str | None:
        """A hint: the other plugins of the slot that have the option."""
        classes = {name: self.registry.entries[slot.name, name].cls for name in self.registry.names(slot.name)}
        names = [name for name, cls in classes.items() if option in cls.Options.model_fields]
        if not names or not slot.key:
            return None
        short, prefix = slot.numbered or ("", "")
        if short and all(name.startswith(prefix) for name in names):
            return f"an option of {short} = {', '.join(name.removeprefix(prefix) for name in names)}"
        return f"an option of {slot.key} = {', '.join(names)}"

    def _options(
        self,
        model: type[Options],
        options: dict[str, Any],
        key: Key,
        own: list[str],
        owners: Callable[[str], str | None] = lambda _: None,
    ) -> BaseModel | None:
        """The options, validated; None after a problem. own: the core's keys of the table, for the sentence about a wrong key."""
        try:
            return validate(model, options)
        except ValidationError as error:
            self.problems += problems_of(error, key, self.raw.tables, partial(keys_below, model, own), owners)
            return None

    def _groups(self, optimizer: Any) -> list[dict[str, Any]]:
        """[[optimizer.groups]], completed with the optimizer's options that a group does not set."""
        table = self.raw.tables.get("optimizer")
        if optimizer is None or not isinstance(table, dict) or not isinstance(table.get("groups", []), list):
            return []
        own = [*table_class(SLOTS["optimizer"]).model_fields]
        common = {k: v for k, v in table.items() if k not in own}
        groups = []
        for i, group in enumerate(table.get("groups", [])):
            if not isinstance(group, dict):
                continue
            different = {k: v for k, v in group.items() if k not in ParameterGroup.model_fields}
            key: Key = ("optimizer", "groups", i)
            options = self._options(optimizer.Options, {**common, **different}, key, [*ParameterGroup.model_fields])
            pattern, values = group.get("pattern", "*"), {} if options is None else options.model_dump()
            members = {"pattern": [pattern] if isinstance(pattern, str) else pattern, "max_dims": group.get("max_dims")}
            groups.append({**members, **values})
        return groups
