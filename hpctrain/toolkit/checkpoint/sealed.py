"""JSON that carries its own checksum over raw bytes.

The first line is `{"checksum":"<xxh3 of all bytes after this line>",` so that the whole is JSON and yet any changed bit
shows, in the checksum as well as after it.
"""

from __future__ import annotations

import json
import re
from typing import Any

import xxhash
from pydantic import ValidationError

from hpctrain.api import CheckpointError, shown

_HEAD = re.compile(rb'\{"checksum":"([0-9a-f]{16})",\n')


def seal(content: dict[str, Any]) -> bytes:
    """`content`, which must not be empty, as the bytes of a file."""
    rest = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()[1:]  # the head has the brace
    return b'{"checksum":"%s",\n' % xxhash.xxh3_64_hexdigest(rest).encode() + rest


def checksum_of(raw: bytes) -> str:
    """The checksum that `seal` put in front."""
    head = _HEAD.match(raw)
    assert head is not None
    return head[1].decode()


def unseal(raw: bytes) -> Any:
    """The content that `seal` has got; CheckpointError if a bit has changed, or for text that is no JSON."""
    head = _HEAD.match(raw)
    if head is None or xxhash.xxh3_64_hexdigest(memoryview(raw)[head.end() :]) != head[1].decode():
        raise CheckpointError("its checksum doesn't fit its content: the file is damaged or cut off")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:  # anybody can compute a checksum
        raise CheckpointError(f"malformed content: {type(error).__name__}: {error}") from error


def malformed(error: ValidationError) -> CheckpointError:
    """The first fault that a schema found."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part)[:80] for part in first["loc"])  # a crafted key may be long
    what = first["msg"].replace("Input should be", "expected")
    if first["type"].startswith(("int", "greater", "less")):
        what = "expected a number that is zero or more, and less than 2^63"
    return CheckpointError(f"malformed content: {place or 'it'}: {what}, found {shown(first['input'])}")
