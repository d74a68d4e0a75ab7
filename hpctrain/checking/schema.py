"""A JSON Schema (draft 2020-12) of the whole job file, the installed plugins' options included.

A plugin's keys are in an if/then by the name of the plugin, not in a union: a validator then names the wrong key.
"""

from __future__ import annotations

from typing import Any

from hpctrain.checking.schema_parts import partial, plain, requirements
from hpctrain.job.tables import Job
from hpctrain.plugins.listing import options_schema
from hpctrain.plugins.registry import Registry
from hpctrain.plugins.slots import TABLES, Slot, table_class

Schema = dict[str, Any]

_REFERENCE = r"^[\w.]+:[\w.]+$"


def job_schema(registry: Registry) -> Schema:
    """The schema of every file, with what a job needs that extends no other file."""
    job = _whole_job(registry)
    schema = partial(job)
    schema["properties"]["extends"] = {"type": "string", "description": "A job file that this one is merged over."}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "hpctrain job",
        "if": {"not": {"required": ["extends"]}},
        "then": requirements(job),
    }


def _whole_job(registry: Registry) -> Schema:
    schema = plain(Job.model_json_schema())
    for slot in TABLES:
        described = {"description": schema["properties"][slot.name].get("description", "")}
        table = _named_tables(slot, registry) if slot.key is None else _table(slot, slot.key, registry)
        schema["properties"][slot.name] = {**described, **({"type": "array", "items": table} if slot.many else table)}
    return schema


def _table(slot: Slot, key: str, registry: Registry) -> Schema:
    """A slot's table: the core's keys, then those of the plugin that `key` names."""
    core = plain(table_class(slot).model_json_schema())
    core["properties"][key] = {**core["properties"][key], **_names(slot, registry)}
    if slot.numbered is not None:
        short = core["properties"][slot.numbered[0]]
        short["enum"] = [number for name in registry.names(slot.name) if (number := _number(slot, name)) is not None]
    rules = [rule for name in registry.names(slot.name) for rule in _rules(slot, key, name, core, registry)]
    named = {option: {"description": text} for option, text in _described(slot, registry).items()}  # for completion
    return {**core, "properties": {**named, **core["properties"]}, "additionalProperties": True, "allOf": rules}


def _described(slot: Slot, registry: Registry) -> dict[str, str]:
    """The options of all plugins of the slot."""
    tables = [registry.entries[slot.name, name].cls.Options for name in registry.names(slot.name)]
    return {option: field.description or "" for table in tables for option, field in table.model_fields.items()}


def _names(slot: Slot, registry: Registry) -> Schema:
    names = {"enum": registry.names(slot.name)}
    return {"if": {"pattern": ":"}, "then": {"pattern": _REFERENCE}, "else": names} if slot.takes_user_code else names


def _rules(slot: Slot, key: str, name: str, core: Schema, registry: Registry) -> list[Schema]:
    """if the table chooses plugin `name`, then it has these keys."""
    then = _keys(slot, name, core, registry)
    found = [_if_chosen(key, name, then)]
    if slot.numbered is None:
        return [*found, _by_default((key,), then)] if core["properties"][key].get("default") == name else found
    short, number = slot.numbered[0], _number(slot, name)
    if number is not None:
        found.append(_if_chosen(short, number, then))
    return [*found, _by_default((key, short), then)] if number == 0 else found


def _number(slot: Slot, name: str) -> int | None:
    """The number that stands for plugin `name`."""
    number = name.removeprefix(slot.numbered[1]) if slot.numbered is not None else name
    return int(number) if number != name and number.isdigit() else None


def _if_chosen(key: str, value: object, then: Schema) -> Schema:
    return {"if": {"properties": {key: {"const": value}}, "required": [key]}, "then": then}


def _by_default(keys: tuple[str, ...], then: Schema) -> Schema:
    return {"if": {"not": {"anyOf": [{"required": [key]} for key in keys]}}, "then": then}


def _keys(slot: Slot, name: str, core: Schema, registry: Registry) -> Schema:
    """The plugin's keys beside the core's, and no others."""
    cls = registry.entries[slot.name, name].cls
    own = plain(options_schema(cls, registry))
    return {
        "title": f"{slot.name} {name}",
        "description": (cls.__doc__ or "").strip(),
        "properties": {**dict.fromkeys(core["properties"], True), **own.get("properties", {})},
        "required": own.get("required", []),
        "additionalProperties": False,
    }


def _named_tables(slot: Slot, registry: Registry) -> Schema:
    """[parallelism]: an integer or a table for each axis. [scheduler]: a table for each target."""
    core = plain(table_class(slot).model_json_schema())
    tables = {name: _keys(slot, name, core, registry) for name in registry.names(slot.name)}
    if slot.name != "parallelism":
        return _closed({name: {**core, "additionalProperties": True, "allOf": [one]} for name, one in tables.items()})
    tables["replicate"] = {"properties": dict.fromkeys(core["properties"], True), "additionalProperties": False}
    integer = {"type": "integer", "minimum": 1}
    axes = {
        name: {
            "description": table.get("description", "Replicas of a sharded model."),
            "if": {"type": "object"},
            "then": {**core, "allOf": [table]},
            "else": integer,
        }
        for name, table in tables.items()
    }
    return _closed(axes)


def _closed(tables: dict[str, Schema]) -> Schema:
    return {"type": "object", "properties": tables, "additionalProperties": False}
