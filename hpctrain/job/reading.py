"""Reads a job file and the files that it extends, and keeps the line of each key."""

from __future__ import annotations

import copy
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, time
from pathlib import Path
from typing import Any

import tomli

from hpctrain.base.errors import JobFileError, UsageError
from hpctrain.base.safe_files import read_bytes, read_pipe
from hpctrain.job.toml import LimitError, first_beyond, parse, written

_LONGEST_CHAIN = 50
"""Files that extend each other."""
_OLD_NAME, _NEW_NAME = "launcher", "scheduler"
"""A table that was named after the programs that start ranks; job files that say [launcher.NAME] mean the same."""
Key = tuple[str | int, ...]
"""A place in the job: ("optimizer", "lr") or ("logger", 0, "name")."""


def dotted(key: Key) -> str:
    """ "[optimizer] lr", for messages."""
    if not key:
        return "the job"
    if len(key) == 1:
        return f"[{key[0]}]"
    inner = ".".join(str(part) for part in key[1:] if not isinstance(part, int))
    return f"[{key[0]}] {inner}" if inner else f"[[{key[0]}]]"


@dataclass
class RawJob:
    """The merged TOML tables, and the place of each key ("job.toml:7" or "--set")."""

    tables: dict[str, Any] = field(default_factory=dict)
    places: dict[Key, str] = field(default_factory=dict)
    source: str = ""
    texts: dict[Key, str] = field(default_factory=dict)
    """How a value of --set that is TOML but no text was typed: `nan` may be meant as a name."""

    def __post_init__(self) -> None:
        for known in (self.places, self.texts):
            for key in [key for key in known if key[:1] == (_OLD_NAME,)]:
                renamed = (_NEW_NAME, *key[1:])
                known[renamed] = known.pop(key)
        if _OLD_NAME in self.tables:
            self.tables = merge(self.tables, {_NEW_NAME: self.tables[_OLD_NAME]})
            del self.tables[_OLD_NAME]

    def place(self, key: Key) -> str:
        """The place of `key`, or of the nearest table around it."""
        while key:
            if key in self.places:
                return self.places[key]
            key = key[:-1]
        return self.source

    def refuse_values(self) -> RawJob:
        """Return this job; JobFileError for an integer, a text or a depth that no job file may have."""
        beyond = first_beyond(self.tables)
        if beyond is not None:
            key, why = beyond
            raise JobFileError(f"{self.place(key)}: {dotted(key)}: {why}")
        return self

    def as_json(self) -> dict[str, Any]:
        """A JSON value for `from_json` on another rank."""
        return {
            "tables": self.tables,
            "places": [[list(key), place] for key, place in self.places.items()],
            "source": self.source,
            "texts": [[list(key), text] for key, text in self.texts.items()],
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> RawJob:
        """The raw job in a value from `as_json`."""
        places, texts = ({tuple(key): text for key, text in value[name]} for name in ("places", "texts"))
        return RawJob(value["tables"], places, value["source"], texts)

    def with_texts(self, wanted: Iterable[Key]) -> RawJob | None:
        """The job with the values of --set at the `wanted` places as text; None if it is the same job."""
        keys = [key for key in dict.fromkeys(wanted) if key in self.texts]
        if not keys:
            return None
        tables = copy.deepcopy(self.tables)
        for key in keys:
            _value_at(tables, key[:-1])[key[-1]] = self.texts[key]
        return replace(self, tables=tables, texts={key: text for key, text in self.texts.items() if key not in keys})


def read_job(path: Path, overrides: Sequence[str] = ()) -> RawJob:
    """Read `path`, merged over the files that it extends, with `overrides` ("table.key=value") on top.

    Raises UsageError with file:line for a missing file, invalid TOML, a cycle, or a malformed override.
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
    if len(chain) > _LONGEST_CHAIN:
        raise JobFileError(
            f"{path}:1: extends: found a chain of more than {_LONGEST_CHAIN} files from {chain[0]} on, expected at most so many"
        )
    try:
        kind = path.stat().st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind)):
            raise JobFileError(f"{path}: found a device or a directory, expected a job file")
        content = read_bytes(resolved) if stat.S_ISREG(kind) else read_pipe(path)
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
    if not os.path.isfile(path.parent / base):  # unlike Path's, it doesn't raise for names that are too long
        raise JobFileError(
            f"{place}: extends: there is no file {path.parent / base}; a path is relative to the file that wrote it"
        )
    below = _read_file(path.parent / base, [*chain, resolved])
    return RawJob(merge(below.tables, raw.tables), _merged_places(below, raw), str(path))


def _case_of(error: tomli.TOMLDecodeError) -> str:
    """A remedy for Python's True and False."""
    found = re.match("True|False", error.doc[error.pos :])
    return "" if found is None else f"; TOML writes {found[0].lower()}, found {found[0]}"


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge tables key by key; everything else, arrays included, comes from `above`."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _merged_places(below: RawJob, above: RawJob) -> dict[Key, str]:
    """The places after a merge. `above` replaces arrays as a whole, so their elements drop the places from below."""
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


def _apply_override(raw: RawJob, override: str) -> None:
    """Apply one --set. The value is TOML; anything else is taken as text. An empty value removes the key, += adds to an array."""
    name, equals, value = override.partition("=")
    adds = name.endswith("+")
    first, *rest = name.removesuffix("+").strip().split(".")
    key = (_NEW_NAME if first == _OLD_NAME else first, *rest)
    if not equals or len(key) < 2 - adds or not all(key) or (adds and not value.strip()):
        raise UsageError(
            f"--set {override}: expected table.key=value, such as optimizer.lr=0.001, or array+=value, such as logger+=csv"
        )
    try:
        found = parse(f"value = {value}")
    except tomli.TOMLDecodeError:
        found = {"value": value.strip()}
    except LimitError as error:
        raise UsageError(f"--set {name}: {error}") from None
    if isinstance(found["value"], date | time):  # no key takes one, and `job.time_limit=10:00` is minutes
        found["value"] = value.strip()
    if len(found) > 1:
        raise UsageError(f"--set {override!r}: found several keys, expected one; repeat --set for each")
    table, place = _table_of(raw, override, key[:-1])
    last, target = key[-1], (*place, key[-1])
    raw.texts.pop(target, None)
    if adds:
        _add(raw, override, table, target, found["value"], value.strip())
    elif value.strip():
        table[last] = found["value"]
        raw.places[target] = f"--set {override}"
        if not isinstance(found["value"], (str, list, dict)):
            raw.texts[target] = value.strip()
    elif last not in table:
        raise UsageError(f"--set {override}: there is no {name.strip()} to remove; expected table.key=value")
    else:
        del table[last]
        raw.places = {place: where for place, where in raw.places.items() if place[: len(target)] != target}


def _add(raw: RawJob, override: str, table: dict[str, Any], array: Key, value: Any, typed: str) -> None:
    """Append to an array of `table`; an array extends it. A row of the job's own arrays may be its name: `logger+=csv`."""
    last = str(array[-1])
    values = table.setdefault(last, [])
    if not isinstance(values, list):
        raise UsageError(f"--set {override}: {dotted(array)} is no array; += adds to arrays, such as logger+=csv")
    for one in value if isinstance(value, list) else [value]:
        row: Key = (*array, len(values))
        text = typed if one is value else written(one)
        if len(array) == 1 and not isinstance(one, dict):
            if isinstance(one, list):
                raise UsageError(f"--set {override}: found an array in an array, expected names or tables")
            one = {"name": one if isinstance(one, str) else text}
        elif not isinstance(one, (str, list, dict)):
            raw.texts[row] = text
        values = [*values, one]
        raw.places[row] = f"--set {override}"
    table[last] = values


def _table_of(raw: RawJob, override: str, parts: Sequence[str]) -> tuple[dict[str, Any], Key]:
    """The table that `parts` lead to, made if need be, and its place. In an array of tables, a part is a row's number or name."""
    table: dict[str, Any] = raw.tables
    place: Key = ()
    rows: list[Any] | None = None
    for part in parts:
        if rows is not None:
            number = _row(rows, part, override, place)
            table, place, rows = rows[number], (*place, number), None
            continue
        below = table.setdefault(part, {})
        place = (*place, part)
        if isinstance(below, list):
            rows = below
            continue
        if not isinstance(below, dict):
            below = table[part] = {"size": below} if place[0] == "parallelism" else {}
        table = below
    if rows is not None:
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
    named = [at for at, row in tables.items() if row.get("name") == part]
    if len(named) == 1:
        return named[0]
    names = [str(row["name"]) for row in tables.values() if "name" in row]
    known = f"0 to {len(rows) - 1}" + (f", or {', '.join(names)}" if names else "") if tables else "none"
    why = f"{len(named)} rows have the name {part!r}; say which by its number" if named else f"there is no row {part!r}"
    raise UsageError(f"--set {override}: [[{'.'.join(map(str, place))}]]: {why} (rows: {known})")
