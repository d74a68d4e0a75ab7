"""The small values of a checkpoint as JSON that any language reads; what JSON lacks is a tagged object.

Plain: None, bool, int, finite float, str, list, dict with string keys. Tagged: {"$tuple": [..]}, {"$bytes": base64},
{"$float": "nan" | "inf" | "-inf"}, {"$dict": [[key, value], ..]} for other keys and for keys that begin with "$".
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any

from hpctrain.api import CheckpointError


def encode(value: Any, key: str = "values") -> Any:
    """`value` as what json.dumps takes; TypeError naming `key` for a type that would not come back the same."""
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is float:
        return {"$float": repr(value)}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if kind in (list, tuple):
        items = [encode(item, f"{key}[{index}]") for index, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if kind is dict:
        if all(type(name) is str and not name.startswith("$") for name in value):
            return {name: encode(item, f"{key}.{name}") for name, item in value.items()}
        return {"$dict": [[encode(name, key), encode(item, f"{key}[{name!r}]")] for name, item in value.items()]}
    raise TypeError(
        f"{key} is a {kind.__module__}.{kind.__qualname__}; a checkpoint's small values are None, bool, int, float, "
        "str, bytes, list, tuple or dict: convert it, or save it as a tensor"
    )


def decode(value: Any) -> Any:
    """The value that `encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {name: decode(item) for name, item in value.items()}
    try:
        return _UNTAG[tag](value[tag])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the manifest's values hold a malformed {tag}: {error}") from error


_UNTAG: dict[str, Callable[[Any], Any]] = {
    "$tuple": lambda items: tuple(decode(item) for item in items),
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$float": float,
    "$dict": lambda pairs: {decode(name): decode(item) for name, item in pairs},
}
