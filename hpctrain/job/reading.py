"""Reads a job file and the files that it extends, and keeps the line of each key; applies --set TABLE.KEY=VALUE to it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from datetime import date, time
from functools import reduce
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tomli

from hpctrain.base.errors import JobFileError, UsageError
from hpctrain.base.safe_files import read_bytes
from hpctrain.job.raw import RawJob, dotted, merge, value_at
from hpctrain.job.toml import Key, key_lines, parse

__all__ = ["read_job"]

_PRESET = "preset:"  # begins the name of a file that comes with hpctrain


def read_job(path: Path, overrides: Sequence[str] = ()) -> RawJob:
    """Read `path`, merged over the files that it extends, with `overrides` ("table.key=value") on top.

    Raises UsageError with file:line for a missing file, invalid TOML, a cycle, or a malformed override.
    """
    raw = _read_file(path, [])
    for override in overrides:
        apply_override(raw, override)
    return raw.refuse_values()  # again: overrides bring values of their own


def _read_file(path: Path, chain: list[Path]) -> RawJob:
    resolved = Path(os.path.realpath(path))  # not resolve(), which raises in a loop of links
    if resolved in chain:
        loop = " -> ".join(str(p) for p in [*chain[chain.index(resolved) :], resolved])
        raise JobFileError(f"{path}:1: extends goes in a circle: {loop}; remove one of them")
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise JobFileError(f"{path}: found a device, a pipe or a directory, expected a job file")
        content = read_bytes(resolved)
        text = content.decode("utf-8-sig").replace("\r\n", "\n")  # some editors begin a file with a byte order mark
    except FileNotFoundError:
        raise JobFileError(f"{path}: there is no such file; expected a job file (hpctrain new writes one)") from None
    except OSError as error:
        raise JobFileError(f"{path}: cannot be read as a job file: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise JobFileError(
            f"{path}:{line}: found byte {content[error.start]:#04x}, expected UTF-8; save it as UTF-8"
        ) from None
    try:
        tables = parse(text)
    except tomli.TOMLDecodeError as error:
        why = f"{error.msg} (column {error.colno}){_case_of(error)}"
        raise JobFileError(f"{path}:{error.lineno}: not valid TOML: {why}") from None
    except ValueError as error:
        raise JobFileError(f"{path}: not a job file: {error}") from None
    raw = RawJob(tables, {key: f"{path}:{line}" for key, line in key_lines(text)}, str(path)).refuse_values()
    base = tables.pop("extends", None)  # no key of the job's: what a rank gets is merged
    if base is None:
        return raw
    place = raw.places.pop(("extends",))
    bases = base if isinstance(base, list) else [base]
    if not bases or not all(isinstance(name, str) for name in bases):
        raise JobFileError(f"{place}: extends: expected the path of a job file, or a list of paths, found {base!r}")
    layers = []
    for name in bases:
        file = _preset(name.removeprefix(_PRESET), place) if name.startswith(_PRESET) else path.parent / name
        if not os.path.isfile(file):  # unlike Path's, it doesn't raise for names that are too long
            raise JobFileError(
                f"{place}: extends: there is no file {file}; a path is relative to the file that wrote it"
            )
        layers.append(_read_file(file, [*chain, resolved]))
    return reduce(_on_top, [*layers, raw])


def _preset(name: str, place: str) -> Path:
    """The file of a model's sizes: the core's, or one in a package that an entry point of the group `hpctrain.presets` names."""
    folders = [str(Path(__file__).parent / "presets")]
    for entry in entry_points(group="hpctrain.presets"):
        with suppress(ImportError):  # a distribution whose files are gone
            spec = find_spec(entry.value)  # unlike an import, it runs nothing of the package but its parents
            folders += [] if spec is None else list(spec.submodule_search_locations or ())
    presets = sorted({path for folder in folders for path in Path(folder).glob("*.toml")})
    named = [path for path in presets if path.stem == name]
    if not named:
        listed = ", ".join(sorted(path.stem for path in presets))
        why = f"there is no preset {name!r}, here or in an installed package; expected one of {listed}"
        raise JobFileError(f"{place}: extends: {why}")
    if len(named) > 1:
        why = f"packages have several presets {name!r}: {', '.join(map(str, named))}; give the path of one instead"
        raise JobFileError(f"{place}: extends: {why}")
    return named[0]


def _case_of(error: tomli.TOMLDecodeError) -> str:
    """A remedy for Python's True and False."""
    word = re.match("True|False", error.doc[error.pos :])
    return "" if word is None else f"; TOML writes {word[0].lower()}, found {word[0]}"


def _on_top(below: RawJob, above: RawJob) -> RawJob:
    """Merge two files. `above` replaces whole arrays, so the places of their elements in `below` are dropped."""
    arrays = {key for key in above.places if isinstance(value_at(above.tables, key), list)}
    kept = {k: v for k, v in below.places.items() if not any(k[: len(a)] == a for a in arrays)}
    return RawJob(merge(below.tables, above.tables), {**kept, **above.places}, above.source)


def apply_override(raw: RawJob, override: str) -> None:
    """Apply one --set. The value is TOML, or else text as it stands. An empty value removes the key; += adds to an array."""
    name, equals, value = override.partition("=")
    adds = name.endswith("+")
    key = tuple(name.removesuffix("+").strip().split("."))
    # a key lies in a table, but += may reach one of the job's own arrays, such as logger
    if not equals or len(key) < 2 - adds or not all(key) or (adds and not value.strip()):
        raise UsageError(
            f"--set {override}: expected table.key=value, such as optimizer.lr=0.001, or array+=value, such as logger+=csv"
        )
    try:
        parsed = parse(f"value = {value}")
    except tomli.TOMLDecodeError:
        parsed = {}
    except ValueError as error:
        raise UsageError(f"--set {name}: {error}") from None
    # text, too: a date or time, since `job.time_limit=10:00` is minutes, and several lines with keys of their own
    is_toml = len(parsed) == 1 and not isinstance(parsed["value"], date | time)
    content = parsed["value"] if is_toml else value.strip()
    table, place = _table_of(raw, override, key[:-1])
    last, target = key[-1], (*place, key[-1])
    if adds:
        _add(raw, override, table, target, content)
    elif value.strip():
        table[last] = content
        raw.places[target] = f"--set {override}"
    elif last not in table:
        raise UsageError(f"--set {override}: there is no {name.strip()} to remove; expected table.key=value")
    else:
        del table[last]
        raw.places = {key: where for key, where in raw.places.items() if key[: len(target)] != target}


def _add(raw: RawJob, override: str, table: dict[str, Any], array: Key, value: Any) -> None:
    """Append a value to an array of `table`, or each value of an array. In [[logger]] and the like, a name stands for a row."""
    last = str(array[-1])
    values = table.setdefault(last, [])
    if not isinstance(values, list):
        raise UsageError(f"--set {override}: {dotted(array)} is no array; += adds to arrays, such as logger+=csv")
    rows = value if isinstance(value, list) else [value]
    if len(array) == 1:
        if any(isinstance(row, list) for row in rows):
            raise UsageError(f"--set {override}: found an array in an array, expected names or tables")
        rows = [row if isinstance(row, dict) else {"name": row} for row in rows]
    raw.places.update({(*array, len(values) + i): f"--set {override}" for i in range(len(rows))})
    table[last] = [*values, *rows]  # a new list: merged tables may share the old one


def _table_of(raw: RawJob, override: str, parts: Sequence[str]) -> tuple[dict[str, Any], Key]:
    """The table that `parts` lead to, new if the job lacks it, and its place. In an array of tables, a part is a row's number or
    name."""
    table: Any = raw.tables
    place: Key = ()
    for part in parts:
        key: Any = _row(table, part, override, place) if isinstance(table, list) else part
        below = table[key] if isinstance(table, list) else table.setdefault(key, {})
        place = (*place, key)
        if not isinstance(below, (dict, list)):  # an axis may be written as its size alone; other values give way
            below = table[key] = {"size": below} if place[0] == "parallelism" else {}
        table = below
    if isinstance(table, list):
        array = ".".join(map(str, place))
        raise UsageError(
            f"--set {override}: [[{array}]] is an array of tables; choose a row by number or name: {array}.0.KEY=VALUE"
        )
    return table, place


def _row(rows: list[Any], part: str, override: str, place: Key) -> int:
    """The number of the row that `part` means."""
    tables = {at: row for at, row in enumerate(rows) if isinstance(row, dict)}
    if part.isdecimal() and int(part) in tables:
        return int(part)
    matches = [at for at, row in tables.items() if row.get("name") == part]
    if len(matches) == 1:
        return matches[0]
    names = [str(row["name"]) for row in tables.values() if "name" in row]
    choices = f"0 to {len(rows) - 1}" + (f", or {', '.join(names)}" if names else "") if tables else "none"
    why = f"there is no row {part!r}"
    if matches:
        why = f"{len(matches)} rows have the name {part!r}; say which by its number"
    raise UsageError(f"--set {override}: [[{'.'.join(map(str, place))}]]: {why} (rows: {choices})")
