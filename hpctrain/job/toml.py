"""TOML within the limits of a job file (64-bit integers, as the standard says, and limited nesting), and the lines of its keys."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import date, time
from typing import Any

import tomli

Key = tuple[str | int, ...]
"""A place in the job: ("optimizer", "lr") or ("logger", 0, "name")."""

_DEEPEST = 50
_INTEGERS = range(-(2**63), 2**63)
_TOO_DEEP = f"tables or arrays are nested too deeply, expected at most {_DEEPEST} levels"


def parse(text: str) -> dict[str, Any]:
    """The tables in `text`. Raises tomli.TOMLDecodeError for its syntax, another ValueError for the limits of a job file."""
    try:
        tables = tomli.loads(text)
    except tomli.TOMLDecodeError:
        raise  # it is a ValueError, too
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError:  # Python converts at most 4,300 digits to an integer
        raise ValueError("found an integer of thousands of digits, expected one of 64 bits") from None
    if any(len(key) > _DEEPEST for key, _ in _walk(tables)):  # later code walks the tables by recursion
        raise ValueError(_TOO_DEEP)
    return tables


def written(value: object) -> str:
    """A value as TOML writes it, in at most 80 characters; "unset" for None, which TOML can't write."""
    text = "unset" if value is None else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def first_beyond(tables: dict[str, Any]) -> tuple[Key, str] | None:
    """The place of the first value beyond the limits of a job file, and what is wrong with it."""
    for key, value in _walk(tables):
        if len(key) > _DEEPEST:
            return key[:2], _TOO_DEEP
        if isinstance(value, int) and value not in _INTEGERS:
            return key, f"found an integer of {value.bit_length()} bits, expected one of 64 bits with its sign"
        texts = [text for text in (value, *key[-1:]) if isinstance(text, str)]
        if any("\ud800" <= letter <= "\udfff" for text in texts for letter in text):  # Python's form of such bytes
            return key, "found bytes that are no UTF-8, expected text in UTF-8"
        if isinstance(value, str) and "\0" in value:
            return key, "found a text with the character U+0000, expected one without"
        if isinstance(value, (date, time)):
            return key, f'found a date or time, which no key takes; expected a text: "{value}"'
    return None


def _walk(tables: dict[str, Any]) -> Iterator[tuple[Key, Any]]:
    """Every value with its place, without recursion; skips everything below a value that is too deep."""
    waiting: list[tuple[Key, Any]] = [((), tables)]
    while waiting:
        key, value = waiting.pop()
        yield key, value
        if len(key) <= _DEEPEST:
            items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            waiting += [((*key, name), inner) for name, inner in items]


# ends of multi-line statements
_ENDS = ("]", "}", '"""', "'''")


def key_lines(text: str) -> Iterator[tuple[Key, int]]:
    """Each key of valid TOML with the (1-based) line where it begins.

    tomli gives no positions. So this function cuts the text into statements (a header, or a key with its full value) and
    lets tomli parse each by itself. A statement is complete as soon as tomli accepts it.
    """
    table: Key = ()
    arrays: dict[Key, int] = {}  # the index of each array's last element
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
            return  # the keys so far keep their lines; the others get the place of their table
        if re.match(r"\s*\[", first):
            table = _header(parsed, arrays)
            above = [table[:length] for length in range(1, len(table)) if table[:length] not in opened]
            opened.update(above)  # [a.b] implies [a]
            yield from ((key, begin + 1) for key in [*above, table])
        else:
            yield from (((*table, *key), begin + 1) for key, _ in _walk(parsed) if key)


def _parse(statement: str) -> dict[str, Any] | None:
    try:
        return parse(statement)
    except ValueError:
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
