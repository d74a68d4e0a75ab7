"""The small values of a checkpoint, in the JSON of hpctrain.api.encode_value."""

from __future__ import annotations

from typing import Any

from hpctrain.api import CheckpointError, decode_value
from hpctrain.api import encode_value as encode

__all__ = ["decode", "decode_all", "encode"]


def decode(value: Any) -> Any:
    """The value that `encode` was given; CheckpointError for text that `encode` wouldn't make."""
    try:
        return decode_value(value)
    except ValueError as error:
        raise CheckpointError(f"its {error}") from error


def decode_all(value: Any) -> dict[str, Any]:
    """All of a checkpoint's values; CheckpointError when they aren't a mapping by names."""
    plain = decode(value)
    if not isinstance(plain, dict) or not all(isinstance(name, str) and name.isprintable() for name in plain):
        raise CheckpointError("its values are no object with plain names for keys")
    return plain
