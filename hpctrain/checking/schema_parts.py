"""Rewrites JSON Schemas, so that a validator's message names the wrong key."""

from __future__ import annotations

from typing import Any

_MAPS = ("properties", "patternProperties", "dependentSchemas")


def plain(schema: dict[str, Any]) -> dict[str, Any]:
    """pydantic's schema without references, null (TOML has none) and unions of types, of which no message tells more than
    that none of them fits."""
    rewritten: dict[str, Any] = _plain(schema, schema.get("$defs", {}))
    rewritten.pop("$defs", None)
    return rewritten


def _plain(schema: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_plain(one, definitions) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        found = definitions[schema["$ref"].rpartition("/")[2]]
        return _plain({**found, **{key: value for key, value in schema.items() if key != "$ref"}}, definitions)
    changed = {
        key: {name: _plain(one, definitions) for name, one in value.items()}
        if key in _MAPS
        else _plain(value, definitions)
        for key, value in schema.items()
        if key not in ("$defs", "default") or (value is not None and key == "default")
    }
    if "anyOf" in changed:
        choices = [one for one in changed.pop("anyOf") if one.get("type") != "null"]
        changed = {**_by_type(choices), **changed}
    return changed


def _by_type(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """A union as a rule for each type, where the types differ."""
    types = [one.get("type") for one in choices]
    if len(choices) == 1:
        return choices[0]
    if None in types or len(set(types)) < len(types):
        return {"anyOf": choices}
    return {"type": types, "allOf": [{"if": {"type": one["type"]}, "then": one} for one in choices]}


def partial(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a part of the tables: no key is required, and no plugin is the default. Rows of arrays stay complete."""
    changed: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            changed[key] = {name: partial(one) if isinstance(one, dict) else one for name, one in value.items()}
        elif key in ("then", "else"):
            changed[key] = partial(value)
        elif key == "allOf":
            changed[key] = [partial(one) for one in value if not _is_default(one)]
        elif key != "required":
            changed[key] = value
    return changed


def requirements(schema: dict[str, Any]) -> dict[str, Any]:
    """The requirements that `partial` leaves out."""
    changed: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "required":
            changed[key] = value
        elif key == "properties":
            inner = {name: requirements(one) for name, one in value.items() if isinstance(one, dict)}
            changed[key] = {name: one for name, one in inner.items() if one}
        elif key in ("then", "else"):
            changed[key] = requirements(value)
        elif key == "allOf":
            changed[key] = [one for one in (one if _is_default(one) else requirements(one) for one in value) if one]
    changed = {key: value for key, value in changed.items() if value}
    return {"if": schema["if"], **changed} if changed.keys() & {"then", "else"} else changed


def _is_default(rule: dict[str, Any]) -> bool:
    """Whether it is the rule of a table that names no plugin."""
    return "not" in rule.get("if", {})
