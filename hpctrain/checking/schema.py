"""A JSON Schema (draft 2020-12) of the whole job file, the installed plugins' options included."""

from __future__ import annotations

from typing import Any

from hpctrain.job.tables import Job
from hpctrain.plugins.listing import options_schema
from hpctrain.plugins.registry import Registry
from hpctrain.plugins.slots import TABLES, Slot, table_class


def job_schema(registry: Registry) -> dict[str, Any]:
    """Core tables as pydantic describes them; in a slot's table each plugin allows its own keys and no others."""
    schema = Job.model_json_schema()
    definitions = schema["$defs"]
    properties = schema["properties"]
    properties["extends"] = {"type": "string", "description": "A job file that this one is merged over."}
    for slot in TABLES:
        tables = [_table(slot, entry.cls.name, registry, definitions) for entry in _entries(registry, slot)]
        if slot.key is None:
            axes = {entry.cls.name: _axis(table) for entry, table in zip(_entries(registry, slot), tables, strict=True)}
            axes["replicate"] = {"type": "integer", "minimum": 1, "description": "Replicas of a sharded model."}
            properties[slot.name] = {"type": "object", "properties": axes}
            continue
        if slot.foreign:
            tables.append(_foreign(slot, definitions))
        described = {"description": properties[slot.name].get("description", ""), "anyOf": tables}
        properties[slot.name] = {"type": "array", "items": described} if slot.many else described
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "hpctrain job"
    return schema


def _entries(registry: Registry, slot: Slot) -> list[Any]:
    return [entry for (name, _), entry in sorted(registry.entries.items()) if name == slot.name]


def _table(slot: Slot, name: str, registry: Registry, definitions: dict[str, Any]) -> dict[str, Any]:
    """The table that chooses plugin `name`."""
    core = table_class(slot).model_json_schema(ref_template="#/$defs/{model}")
    cls = registry.entries[slot.name, name].cls
    own = options_schema(cls, registry)
    definitions.update(core.pop("$defs", {}))
    definitions.update(own.pop("$defs", {}))
    properties = {**own.get("properties", {}), **core["properties"]}
    required = {*core.get("required", ()), *own.get("required", ())}
    if slot.key is not None:
        default = properties[slot.key].get("default")
        properties[slot.key] = {**properties[slot.key], "const": name}
        if slot.numbered is None and default != name:
            required.add(slot.key)  # without the key the default plugin is meant
    chosen = _numbered(slot, name, properties, required) if slot.numbered is not None else {}
    return {
        "type": "object",
        "title": f"{slot.name} {name}",
        "description": (cls.__doc__ or "").strip(),
        "properties": properties,
        "required": sorted(required),
        "additionalProperties": False,
        **chosen,
    }


def _numbered(slot: Slot, name: str, properties: dict[str, Any], required: set[str]) -> dict[str, Any]:
    """That a table has the plugin's name or its number; `properties` get the number, or lose it."""
    assert slot.key is not None and slot.numbered is not None
    short, prefix = slot.numbered
    number = name.removeprefix(prefix)
    if number == name or not number.isdigit():
        del properties[short]
        required.add(slot.key)
        return {}
    properties[short] = {**properties[short], "const": int(number)}
    one_of = [{"required": [slot.key]}, {"required": [short]}]
    return {"oneOf": one_of} if int(number) else {"not": {"required": [slot.key, short]}}


def _axis(table: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [{"type": "integer", "minimum": 1}, table]}


def _foreign(slot: Slot, definitions: dict[str, Any]) -> dict[str, Any]:
    """ "package.module:callable": its arguments are anybody's."""
    core = table_class(slot).model_json_schema(ref_template="#/$defs/{model}")
    definitions.update(core.pop("$defs", {}))
    core["properties"]["name"]["pattern"] = r"^[\w.]+:[\w.]+$"
    return {**core, "title": f"{slot.name} package.module:callable", "additionalProperties": True}
