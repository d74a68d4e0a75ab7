"""A job's TOML tables as they were written, and the place of each key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hpctrain.base.errors import JobFileError
from hpctrain.job.toml import Key, first_beyond

__all__ = ["RawJob"]


def dotted(key: Key) -> str:
    """ "[optimizer] lr", for messages."""
    if not key:
        return "the job"
    if len(key) == 1:
        return f"[{key[0]}]"
    inner = ".".join(str(part) for part in key[1:] if not isinstance(part, int))
    return f"[{key[0]}] {inner}" if inner else f"[[{key[0]}]]"  # a number alone: a row of an array of tables


@dataclass
class RawJob:
    """The merged TOML tables, and the place of each key ("job.toml:7" or "--set")."""

    tables: dict[str, Any] = field(default_factory=dict)
    places: dict[Key, str] = field(default_factory=dict)
    source: str = ""

    def place(self, key: Key) -> str:
        """The place of `key`, or of the nearest table around it."""
        around = (key[:length] for length in range(len(key), 0, -1))
        return next((self.places[part] for part in around if part in self.places), self.source)

    def refuse_values(self) -> RawJob:
        """Return this job; JobFileError for a value that no job file may have, or for tables nested too deeply."""
        beyond = first_beyond(self.tables)
        if beyond is not None:
            key, why = beyond
            raise JobFileError(f"{self.place(key)}: {dotted(key)}: {why}")
        return self

    def as_json(self) -> dict[str, Any]:
        """A JSON value for `from_json` on another rank."""
        places = [[list(key), place] for key, place in self.places.items()]  # JSON has text alone for keys
        return {"tables": self.tables, "places": places, "source": self.source}

    @staticmethod
    def from_json(value: dict[str, Any]) -> RawJob:
        """The raw job in a value from `as_json`."""
        return RawJob(value["tables"], {tuple(key): place for key, place in value["places"]}, value["source"])


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge tables key by key; everything else, arrays included, comes from `above`."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def value_at(tables: Any, key: Key) -> Any:
    """The value at `key`; None where there is none."""
    for part in key:
        try:
            tables = tables[part]
        except (KeyError, IndexError, TypeError):
            return None
    return tables
