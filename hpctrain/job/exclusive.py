"""Keys of a table that exclude each other, for the JSON Schema."""

from __future__ import annotations

from pydantic.config import JsonDict


def either(first: tuple[str, ...], second: tuple[str, ...]) -> JsonDict:
    """The JSON Schema of a table that has all keys of `first` and none of `second`, or the other way round."""
    return {
        "if": {"anyOf": [{"required": [key]} for key in second]},
        "then": {"required": list(second), "properties": excluded(first, second)},
        "else": {"required": list(first)},
    }


def excluded(keys: tuple[str, ...], others: tuple[str, ...]) -> JsonDict:
    """Properties that refuse `keys`; the message of a validator shows the title."""
    return {key: {"not": {"title": f"{key} beside {' and '.join(others)}; keep one of them"}} for key in keys}
