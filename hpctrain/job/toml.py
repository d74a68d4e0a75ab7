"""TOML with the limits of a job file: 64-bit integers, as the standard says, and limited nesting."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import date, time
from typing import Any

import tomli

_DEEPEST = 50
_INTEGERS = range(-(2**63), 2**63)


_TOO_DEEP = f"tables or arrays are nested too deeply, expected at most {_DEEPEST} levels"


class LimitError(ValueError):
    """TOML that exceeds the limits of a job file; `line` counts from 1, None if unknown."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


def parse(text: str) -> dict[str, Any]:
    """Raises tomli.TOMLDecodeError, or LimitError."""
    try:
        tables = tomli.loads(text)
    except tomli.TOMLDecodeError:
        raise
    except RecursionError:
        raise LimitError(_TOO_DEEP) from None
    except ValueError:  # Python converts at most 4,300 digits to an integer
        digits = re.search(r"\d[\d_]{4300,}", text)
        line = 1 + text.count("\n", 0, digits.start()) if digits else None
        raise LimitError("found an integer of thousands of digits, expected one of 64 bits", line) from None
    if any(len(key) > _DEEPEST for key, _ in _walk(tables)):  # later code walks the tables by recursion
        raise LimitError(_TOO_DEEP)
    return tables


def written(value: object) -> str:
    """A value as TOML writes it, in at most 80 characters; "unset" for None, which TOML can't write."""
    text = "unset" if value is None else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def first_beyond(tables: dict[str, Any]) -> tuple[tuple[str | int, ...], str] | None:
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


def _walk(tables: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Every value with its place, without recursion; skips everything below a value that is too deep."""
    waiting: list[tuple[tuple[str | int, ...], Any]] = [((), tables)]
    while waiting:
        key, value = waiting.pop()
        yield key, value
        if len(key) <= _DEEPEST:
            items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            waiting += [((*key, name), inner) for name, inner in items]
