"""Rules of a conversion: the counterpart of each key of another library's configuration, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hpctrain.api import UsageError

Kind = Literal["is", "not needed", "no counterpart"]
Written = Mapping[str, Any]
"""Values by the job's keys: "sharding.stage", "logger:wandb.project" of the table [[logger]] with that name."""


class LackingError(Exception):
    """Says why this value of a key has no counterpart, though others have."""


@dataclass(frozen=True)
class Source:
    """A configuration. ranks: with which it is to run, where the user says so."""

    tables: Mapping[str, Any]
    ranks: int | None = None
    notes: list[str] = field(default_factory=list)
    """Lines for the top of the file."""
    lacks: list[tuple[str, str]] = field(default_factory=list)
    """Defaults of the library without a counterpart: the key, and the reason."""

    def is_auto(self, *keys: str) -> bool:
        """Whether the program that starts the training fills in one of these keys."""
        return any(self._raw(key) == "auto" for key in keys)

    def _raw(self, key: str) -> Any:
        found: Any = self.tables
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def get(self, key: str, default: Any = None) -> Any:
        """The value at a dotted key; the default where it is missing or "auto"."""
        found = self._raw(key)
        return default if found is None or found == "auto" else found

    def data_ranks(self, why: str) -> int:
        """The ranks with different samples. Raises UsageError if nobody has said with how many ranks it is to run."""
        if self.ranks is None:
            raise UsageError(f"{why}; give --ranks N, the number of ranks (GPUs) that the configuration is for")
        return max(1, self.ranks // max(1, int(self.get("tensor_parallel.autotp_size", 1))))


@dataclass(frozen=True)
class Rule:
    """A key of the other library's. says: for a person, in Markdown. harmless: a value of a key without a counterpart that asks for
    nothing, besides false and nothing itself."""

    key: str
    kind: Kind
    says: str
    make: Callable[[Any, Source], Written] = lambda value, source: {}
    harmless: Any = False

    def asks(self, value: Any) -> bool:
        """Whether a value asks for something."""
        return value != self.harmless and value not in (None, False, [], {}, "none")


def key_of(key: str, target: str) -> Rule:
    """A key whose value is that of the job's key `target`."""
    return Rule(key, "is", _told(target), lambda value, source: {target: value})


def made(key: str, says: str, make: Callable[[Any, Source], Written]) -> Rule:
    """A key whose value is made into other values."""
    return Rule(key, "is", says, make)


def switch(key: str, written: Written, says: str | None = None) -> Rule:
    """A key that writes something where it is true."""
    told = says or ", ".join(f"{_told(target)[:-1]} = {_literal(value)}`" for target, value in written.items())
    return Rule(key, "is", told, lambda value, source: written if value else {})


def unneeded(key: str, why: str) -> Rule:
    return Rule(key, "not needed", why)


def lacking(key: str, why: str) -> Rule:
    return Rule(key, "no counterpart", why)


def only(key: str, harmless: Any, why: str) -> Rule:
    """A key that has no counterpart, unless its value is `harmless`: then it is not needed."""
    return Rule(key, "no counterpart", why, harmless=harmless)


def _told(target: str) -> str:
    table, _, key = target.rpartition(".")
    if target.startswith("logger:"):
        name, _, key = target.removeprefix("logger:").partition(".")
        return f'`[[logger]] name = "{name}"`' + (f", `{key}`" if key else "")
    return f"`[{table}] {key}`"


def _literal(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')
