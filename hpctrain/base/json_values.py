"""Small Python values as JSON that any language reads; types that JSON lacks become tagged objects.

Plain: None, bool, int, finite float, str, list, dict with string keys. Tagged: {"$tuple": [..]}, {"$bytes": base64},
{"$float": "nan" | "inf" | "-inf"}, {"$dict": [[key, value], ..]} for other keys and for keys that begin with "$".
NumPy's numbers become Python's.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from numbers import Number
from typing import Any

MOST_DEPTH = 64
"""How deep values may be nested."""


def encode(value: Any, key: str = "values", depth: int = 0) -> Any:
    """`value` in a form for json.dumps; TypeError naming `key` if `decode` would not return the same value."""
    if type(value).__module__ == "numpy" and isinstance(value, Number):
        value = value.item()  # type: ignore[attr-defined]
    kind = type(value)
    if depth > MOST_DEPTH:
        raise TypeError(f"{key} is nested more than {MOST_DEPTH} deep; save it as bytes or as a tensor")
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is float:
        return {"$float": repr(value)}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if kind in (list, tuple):
        items = [encode(item, f"{key}[{index}]", depth + 1) for index, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if kind is dict:
        if all(type(name) is str and not name.startswith("$") for name in value):
            return {name: encode(item, f"{key}.{name}", depth + 1) for name, item in value.items()}
        pairs = [
            [encode(name, key, depth + 1), encode(item, f"{key}[{name!r}]", depth + 1)] for name, item in value.items()
        ]
        return {"$dict": pairs}
    raise TypeError(
        f"{key} is a {kind.__module__}.{kind.__qualname__}; a checkpoint's small values are None, bool, int, float, "
        "str, bytes, list, tuple or dict: convert it, or save it as a tensor"
    )


def decode(value: Any, depth: int = 0) -> Any:
    """The original of a value from `encode`; ValueError for a value that `encode` cannot produce."""
    if depth > MOST_DEPTH:
        raise ValueError(f"values are nested more than {MOST_DEPTH} deep")
    if isinstance(value, list):
        return [decode(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {name: decode(item, depth + 1) for name, item in value.items()}
    try:
        return _UNTAG[tag](value[tag], depth + 1)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"values hold a malformed {tag[:80]}: {error}") from error


_UNTAG: dict[str, Callable[[Any, int], Any]] = {
    "$tuple": lambda items, depth: tuple(decode(item, depth) for item in items),
    "$bytes": lambda text, _: base64.b64decode(text, validate=True),
    "$float": lambda text, _: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[text],
    "$dict": lambda pairs, depth: {decode(name, depth): decode(item, depth) for name, item in pairs},
}
