"""Converts a configuration into the text of a job file: a line for each key with a counterpart, a comment for each other one."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
import yaml

from hpctrain.api import UsageError, reason
from hpctrain_plugins.convert import accelerate, deepspeed
from hpctrain_plugins.convert.rules import Kind, LackingError, Rule, Source, Written

_UNKNOWN = "not a documented key"
_AUTO = "the program that starts the training fills it in; give the value here"


@dataclass(frozen=True)
class Library:
    """A library whose configurations can be converted."""

    name: str
    rules: Mapping[str, Rule]
    sections: Mapping[str, str]
    defaults: Callable[[Source], Written]


LIBRARIES = {
    name: Library(name, {rule.key: rule for rule in rules}, of.SECTIONS, of.defaults)
    for name, of, rules in (
        ("deepspeed", deepspeed, [*deepspeed.RULES, *deepspeed.OTHERS]),
        ("accelerate", accelerate, accelerate.RULES),
    )
}


@dataclass
class Conversion:
    """The lines of a job's tables, in order, and the keys of the configuration by what became of them."""

    lines: dict[str, dict[str, str]] = field(default_factory=dict)
    """The lines of each table by their keys."""
    keys: dict[Kind, list[str]] = field(default_factory=lambda: {"is": [], "not needed": [], "no counterpart": []})
    notes: list[str] = field(default_factory=list)

    def write(self, written: Written, origin: str) -> None:
        """Add values, each with the key that it comes from."""
        for target, value in written.items():
            table, key = _place(target)
            if key:
                self.lines.setdefault(table, {})[key] = f"{_assigned(key, value)}  # {origin}"
            else:
                self.lines.setdefault(table, {})

    def remark(self, table: str, key: str, value: Any, why: str) -> None:
        found = "" if value is None else f" = {json.dumps(value, default=str)}"
        self.lines.setdefault(table, {})[f"# {key}"] = f"# {key}{found}: {why}"

    def has(self, target: str) -> bool:
        """Whether a value is there."""
        table, key = _place(target)
        return key in self.lines.get(table, {})

    def text(self, head: Sequence[str]) -> str:
        """The job file."""
        blocks = ["\n".join(f"# {line}" for line in [*head, *self.notes])]
        # what belongs to no table comes first
        for table, lines in sorted(self.lines.items(), key=lambda one: bool(one[0])):
            is_real = any(not key.startswith("#") for key in lines)
            name = table.removeprefix("logger:")
            if table.startswith("logger:"):
                heading = [f'[[logger]]\nname = "{name}"']
            else:
                heading = [f"[{table}]"] if is_real else [f"# [{table}]"] if table else []
            blocks.append("\n".join([*heading, *lines.values()]))
        return "\n\n".join(blocks) + "\n"


def converted(path: Path, library: str, ranks: int | None) -> Conversion:
    """Raises UsageError for a file that is none, and for values that need the number of ranks."""
    source = Source(_read(path), ranks)
    made = Conversion(notes=source.notes)
    _convert(made, source, LIBRARIES[library])
    if library == "accelerate" and (inner := source.get("deepspeed_config.deepspeed_config_file")) is not None:
        sizes = [source.get(key, 1) for key in accelerate.MODEL_AXES]
        given = ranks or source.get("num_processes")
        given = None if given is None else max(1, given // math.prod(max(1, size) for size in sizes))
        _convert(made, Source(_read(path.parent / str(inner)), given, source.notes), LIBRARIES["deepspeed"])
    return made


def _convert(made: Conversion, source: Source, library: Library) -> None:
    for key, value in _leaves(source.tables, library.rules):
        rule = library.rules.get(key)
        kind: Kind = "no counterpart" if rule is None else rule.kind
        why = _UNKNOWN if rule is None else rule.says
        written: Written = {}
        try:
            if value == "auto":
                kind, why = "no counterpart", _AUTO
            elif rule is not None and value is not None:
                written = rule.make(value, source)
                if rule.kind == "no counterpart" and not rule.asks(value):
                    kind, why = "not needed", "it asks for nothing"
        except LackingError as error:
            kind, why = "no counterpart", str(error)
        except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError) as error:
            found = json.dumps(value, default=str)
            raise UsageError(f"{key}: found {found}, which {library.name} would not take ({error})") from error
        made.keys[kind].append(key)
        made.write(written, key)
        if not written and kind != "is":
            told = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", why).replace("`", "")
            made.remark(_section(key, library), key, value, told if kind == "no counterpart" else f"not needed: {told}")
    for key, why in source.lacks:
        made.keys["no counterpart"].append(key)
        made.remark(_section(key, library), key, None, why)
    for target, value in library.defaults(source).items():
        if not made.has(target):
            made.write({target: value}, f"{library.name}'s default")


def _leaves(tables: Mapping[str, Any], rules: Mapping[str, Rule], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key with its value; a table that is switched off has none."""
    for name, value in tables.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping):
            # DeepSpeed's tables with a switch are off without it
            if not value.get("enabled", f"{key}.enabled" not in rules):
                continue
            if value.get("enabled") == "auto":
                yield f"{key}.enabled", "auto"
                continue
            if key not in rules:
                yield from _leaves(value, rules, f"{key}.")
                continue
        yield key, value


def _section(key: str, library: Library) -> str:
    return next((table for begin, table in library.sections.items() if key.startswith(begin)), "")


def _place(target: str) -> tuple[str, str]:
    """The table and the key of "sharding.stage", "logger:wandb.project" or "logger:csv"."""
    if target.startswith("logger:") and "." not in target:
        return target, ""
    table, _, key = target.rpartition(".")
    return table, key


def _assigned(key: str, value: Any) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(_assigned(name, one) for name, one in value.items())
        return f"{key} = {{ {inner} }}"
    text: str = tomli_w.dumps({key: value}, indent=0)
    return " ".join(text.split()).replace("[ ", "[").replace(", ]", "]").replace(" ]", "]")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        try:
            found = json.loads(text)
        except ValueError:
            found = yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {reason(error)}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is neither JSON nor YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, Mapping):
        raise UsageError(f"{path} holds {type(found).__name__}, expected a table of keys")
    return found
