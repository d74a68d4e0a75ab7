"""Finds the line of each key of a TOML file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import tomli

from hpctrain.job.raw import Key
from hpctrain.job.toml import LimitError, parse

_ENDS = ("]", "}", '"""', "'''")
"""Ends of multi-line statements."""


def key_lines(text: str) -> Iterator[tuple[Key, int]]:
    """Each key of valid TOML with the (1-based) line where it begins.

    tomli gives no positions. So this function cuts the text into statements (a header, or a key with its full value) and
    lets tomli parse each by itself. A statement is complete as soon as tomli accepts it.
    """
    table: Key = ()
    arrays: dict[Key, int] = {}
    opened: set[Key] = set()
    lines = text.split("\n")  # not splitlines: TOML knows no other line ends
    at = 0
    while at < len(lines):
        begin, first = at, lines[at]
        at += 1
        if not first.strip() or first.lstrip().startswith("#"):
            continue
        parsed = _parse(first)
        while parsed is None and at < len(lines):
            at += 1
            if any(end in lines[at - 1] for end in _ENDS):  # not after every line: an array may have thousands
                parsed = _parse("\n".join(lines[begin:at]))
        if parsed is None:
            return
        if re.match(r"\s*\[", first):
            table = _header(parsed, arrays)
            above = [table[:length] for length in range(1, len(table)) if table[:length] not in opened]
            opened.update(above)  # [a.b] implies [a]
            yield from ((key, begin + 1) for key in [*above, table])
        else:
            yield from (((*table, *key), begin + 1) for key in _leaves(parsed))


def _parse(statement: str) -> dict[str, Any] | None:
    try:
        return parse(statement)
    except (tomli.TOMLDecodeError, LimitError):
        return None


def _header(parsed: dict[str, Any], arrays: dict[Key, int]) -> Key:
    """The key that a header line opens; for an array of tables, with the index of the element."""
    key: Key = ()
    value: Any = parsed
    while value:
        if isinstance(value, list):
            arrays[key] = arrays.get(key, -1) + 1
            return (*key, arrays[key])
        name = next(iter(value))
        key, value = (*key, name), value[name]
        if value and key in arrays and isinstance(value, dict):
            key = (*key, arrays[key])  # [logger.x] below [[logger]] belongs to its last element
    return key


def _leaves(value: Any, key: Key = ()) -> Iterator[Key]:
    """Every key below `value`, tables and arrays included."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, below in items:
        yield (*key, name)
        yield from _leaves(below, (*key, name))
