"""Reads a job file with everything it extends, and remembers the line that each key came from."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

from hpctrain.errors import JobFileError, UsageError
from hpctrain.job.toml import LimitError, first_beyond, parse

Key = tuple[str | int, ...]
"""A place in the job: ("optimizer", "lr") or ("logger", 0, "name")."""


def dotted(key: Key) -> str:
    """ "[optimizer] lr", as a person would say it."""
    if not key:
        return "the job"
    if len(key) == 1:
        return f"[{key[0]}]"
    inner = ".".join(str(part) for part in key[1:] if not isinstance(part, int))
    return f"[{key[0]}] {inner}" if inner else f"[[{key[0]}]]"


@dataclass
class RawJob:
    """The merged tables as TOML gave them, and where each key stands ("job.toml:7" or "--set")."""

    tables: dict[str, Any] = field(default_factory=dict)
    places: dict[Key, str] = field(default_factory=dict)
    source: str = ""

    def place(self, key: Key) -> str:
        """Where `key`, or the nearest table around it, was written."""
        while key:
            if key in self.places:
                return self.places[key]
            key = key[:-1]
        return self.source

    def refuse_values(self) -> RawJob:
        """Itself; JobFileError for an integer, a text or a depth that no job file may hold."""
        beyond = first_beyond(self.tables)
        if beyond is not None:
            key, why = beyond
            raise JobFileError(f"{self.place(key)}: {dotted(key)}: {why}")
        return self

    def as_json(self) -> dict[str, Any]:
        """A JSON value from which another rank makes it again."""
        return {
            "tables": self.tables,
            "places": [[list(key), place] for key, place in self.places.items()],
            "source": self.source,
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> RawJob:
        """The raw job that `as_json` gave."""
        return RawJob(value["tables"], {tuple(key): place for key, place in value["places"]}, value["source"])


def read_job(path: Path, overrides: Sequence[str] = ()) -> RawJob:
    """Read `path`, merge what it extends below it and `overrides` ("table.key=value") over it.

    Raises UsageError with file:line for a missing file, bad TOML, a cycle, or a malformed override.
    """
    raw = _read_file(path, [])
    raw.source = str(path)
    for override in overrides:
        _apply_override(raw, override)
    return raw.refuse_values()


def _read_file(path: Path, chain: list[Path]) -> RawJob:
    resolved = Path(os.path.realpath(path))  # not resolve(), which raises in a loop of links
    if resolved in chain:
        loop = " -> ".join(str(p) for p in [*chain[chain.index(resolved) :], resolved])
        raise JobFileError(f"{path}:1: extends goes in a circle: {loop}; remove one of them")
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig").replace("\r\n", "\n")  # some editors begin a file with a byte order mark
    except FileNotFoundError:
        raise JobFileError(f"{path}: there is no such file; expected a job file (hpctrain new writes one)") from None
    except OSError as error:
        raise JobFileError(f"{path}: cannot be read as a job file: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise JobFileError(
            f"{path}:{line}: found byte {content[error.start]:#04x}, expected UTF-8; save it so"
        ) from None
    try:
        tables = parse(text)
    except tomli.TOMLDecodeError as error:
        raise JobFileError(f"{path}:{error.lineno}: not valid TOML: {error.msg} (column {error.colno})") from None
    except LimitError as error:
        place = path if error.line is None else f"{path}:{error.line}"
        raise JobFileError(f"{place}: not a job file: {error}") from None
    raw = RawJob(tables, {key: f"{path}:{line}" for key, line in key_lines(text)}, str(path)).refuse_values()
    base = tables.pop("extends", None)
    if base is None:
        return raw
    place = raw.places.pop(("extends",))
    if not isinstance(base, str):
        raise JobFileError(f"{place}: extends: expected the path of one job file, found {base!r}")
    if not os.path.isfile(path.parent / base):  # unlike Path's, it takes names that are too long
        raise JobFileError(
            f"{place}: extends: there is no file {path.parent / base}; a path is relative to the file that wrote it"
        )
    below = _read_file(path.parent / base, [*chain, resolved])
    return RawJob(merge(below.tables, raw.tables), _merged_places(below, raw), str(path))


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Tables key by key, everything else (arrays too) from `above`."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _merged_places(below: RawJob, above: RawJob) -> dict[Key, str]:
    """`above` replaces an array whole, so that no element keeps a line of the file below."""
    arrays = {key for key in above.places if isinstance(_value_at(above.tables, key), list)}
    kept = {k: v for k, v in below.places.items() if not any(k[: len(a)] == a for a in arrays)}
    return {**kept, **above.places}


def _value_at(tables: Any, key: Key) -> Any:
    for part in key:
        try:
            tables = tables[part]
        except (KeyError, IndexError, TypeError):
            return None
    return tables


_ENDS = ("]", "}", '"""', "'''")
"""Characters that the last line of a multi-line statement has."""


def key_lines(text: str) -> Iterator[tuple[Key, int]]:
    """Each key of valid TOML with the (1-based) line where it begins.

    tomli gives no positions, so the text is cut into statements (a header, or a key with its whole value) and
    tomli reads each alone: a statement is complete as soon as tomli accepts it.
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
            if any(end in lines[at - 1] for end in _ENDS):  # not each line: an array may have thousands
                parsed = _parse("\n".join(lines[begin:at]))
        if parsed is None:
            return
        if re.match(r"\s*\[", first):
            table = _header(parsed, arrays)
            above = [table[:length] for length in range(1, len(table)) if table[:length] not in opened]
            opened.update(above)  # [a.b] writes [a], too
            yield from ((key, begin + 1) for key in [*above, table])
        else:
            yield from (((*table, *key), begin + 1) for key in _leaves(parsed))


def _parse(statement: str) -> dict[str, Any] | None:
    try:
        return parse(statement)
    except (tomli.TOMLDecodeError, LimitError):
        return None


def _header(parsed: dict[str, Any], arrays: dict[Key, int]) -> Key:
    """The key that a header line opens; an array of tables counts its elements."""
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


def _apply_override(raw: RawJob, override: str) -> None:
    """One --set: the value is TOML; what is no TOML value is taken as text, and nothing at all takes the key away."""
    name, equals, value = override.partition("=")
    key = tuple(name.strip().split("."))
    if not equals or len(key) < 2 or not all(key):
        raise UsageError(f"--set {override}: expected table.key=value, such as optimizer.lr=0.001")
    try:
        found = parse(f"value = {value}")
    except tomli.TOMLDecodeError:
        found = {"value": value.strip()}
    except LimitError as error:
        raise UsageError(f"--set {name}: {error}") from None
    if len(found) > 1:
        raise UsageError(f"--set {override!r}: found several keys, expected one; repeat --set for each")
    table = raw.tables
    for part in key[:-1]:
        below = table.setdefault(part, {})
        if isinstance(below, list) and part != key[-1]:
            raise UsageError(f"--set {override}: [[{part}]] is a list of tables; change it in the file")
        if not isinstance(below, dict):
            below = table[part] = {"size": below} if key[0] == "parallelism" else {}
        table = below
    if value.strip():
        table[key[-1]] = found["value"]
        raw.places[key] = f"--set {override}"
    elif key[-1] not in table:
        raise UsageError(f"--set {override}: there is no {name.strip()} to take away; expected table.key=value")
    else:
        del table[key[-1]]
        raw.places = {place: where for place, where in raw.places.items() if place[: len(key)] != key}
