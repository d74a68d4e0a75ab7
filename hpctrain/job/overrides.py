"""Applies --set TABLE.KEY=VALUE to a job."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, time
from typing import Any

import tomli

from hpctrain.base.errors import UsageError
from hpctrain.job.raw import RawJob, dotted
from hpctrain.job.toml import Key, LimitError, parse


def apply_override(raw: RawJob, override: str) -> None:
    """Apply one --set. The value is TOML; anything else is taken as text. An empty value removes the key, += adds to an array."""
    name, equals, value = override.partition("=")
    adds = name.endswith("+")
    key = tuple(name.removesuffix("+").strip().split("."))
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
    if adds:
        _add(raw, override, table, target, found["value"])
    elif value.strip():
        table[last] = found["value"]
        raw.places[target] = f"--set {override}"
    elif last not in table:
        raise UsageError(f"--set {override}: there is no {name.strip()} to remove; expected table.key=value")
    else:
        del table[last]
        raw.places = {place: where for place, where in raw.places.items() if place[: len(target)] != target}


def _add(raw: RawJob, override: str, table: dict[str, Any], array: Key, value: Any) -> None:
    """Append to an array of `table`; an array extends it. A row of the job's own arrays may be its name: `logger+=csv`."""
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
    table[last] = [*values, *rows]


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
