"""Converts a configuration into the text of a job file: a line for each key with a counterpart, a comment for each other one."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli
import tomli_w

from hpctrain.api import UsageError
from hpctrain.toolkit.commands import escaped
from hpctrain_tools.convert import accelerate, deepspeed
from hpctrain_tools.convert.reading import read
from hpctrain_tools.convert.rules import Kind, LackingError, Rule, Source, Written

_UNKNOWN = "not a documented key"
_AUTO = "the program that starts the training fills it in; give the value here"
_UNDER_AUTO = "the program that starts the training switches its table on; give it with [precision] mode"


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
    tables: dict[str, Any] = field(default_factory=dict)
    """The tables that the job is to hold."""
    keys: dict[Kind, list[str]] = field(default_factory=lambda: {"is": [], "not needed": [], "no counterpart": []})
    notes: list[str] = field(default_factory=list)

    def write(self, written: Written, origin: str) -> None:
        """Add values, each with the key that it comes from."""
        for target, value in written.items():
            table, key = _place(target)
            lines, assigned = self.lines.setdefault(table, {}), _assigned(key, value) if key else ""
            meant = self.tables.setdefault(table, {})
            if key:
                meant[key] = value
            before, _, origins = lines.get(key, "").partition("  # ")
            if before and before != assigned:
                lines[f"# {origins}"] = f"# {origins}: {before} gives way to {one_line(origin)}"
            told = f"{origins}, {one_line(origin)}" if before == assigned and origins else one_line(origin)
            lines[key or "# "] = f"{assigned}  # {told}" if key else f"# {told}"

    def remark(self, table: str, key: str, value: Any, why: str) -> None:
        found = "" if value is None else f" = {json.dumps(value, default=str)}"
        self.lines.setdefault(table, {})[f"# {key}"] = f"# {one_line(f'{key}{found}: {why}')}"

    def has(self, target: str) -> bool:
        """Whether a value is there."""
        table, key = _place(target)
        return key in self.lines.get(table, {})

    def _meant(self) -> dict[str, Any]:
        """The tables that the rules have written, as the job's."""
        found: dict[str, Any] = {}
        for table, values in self.tables.items():
            if table.startswith("logger:"):
                found.setdefault("logger", []).append({"name": table.removeprefix("logger:"), **values})
            else:
                place = found
                for name in filter(None, table.split(".")):
                    place = place.setdefault(name, {})
                place.update(values)
        return found

    def text(self, head: Sequence[str]) -> str:
        """The job file. Raises UsageError if it would hold anything that no rule has written."""
        blocks = ["\n".join(f"# {one_line(line)}" for line in [*head, *self.notes])]
        # what belongs to no table comes first
        for table, lines in sorted(self.lines.items(), key=lambda one: bool(one[0])):
            is_real = any(not key.startswith("#") for key in lines)
            name = table.removeprefix("logger:")
            if table.startswith("logger:"):
                heading = [f'[[logger]]\nname = "{name}"']
            else:
                heading = [f"[{table}]"] if is_real else [f"# [{table}]"] if table else []
            blocks.append("\n".join([*heading, *lines.values()]))
        text = "\n\n".join(blocks) + "\n"
        if tomli.loads(text) != self._meant():
            raise UsageError("the configuration has text that would become a part of the job; nothing is written")
        return text


def converted(path: Path, library: str, ranks: int | None) -> Conversion:
    """Raises UsageError for a file that is none, and for values that need the number of ranks."""
    source = Source(read(path), ranks)
    made = Conversion(notes=source.notes)
    _convert(made, source, LIBRARIES[library])
    if library == "accelerate" and (inner := source.get("deepspeed_config.deepspeed_config_file")) is not None:
        sizes = [source.get(key, 1) for key in accelerate.MODEL_AXES]
        given = ranks or source.get("num_processes")
        given = None if given is None else max(1, given // math.prod(max(1, size) for size in sizes))
        _convert(made, Source(read(path.parent / str(inner)), given, source.notes), LIBRARIES["deepspeed"])
    return made


def _convert(made: Conversion, source: Source, library: Library) -> None:
    for key, value, is_open in _leaves(source.tables, library.rules):
        rule = library.rules.get(key)
        kind: Kind = "no counterpart" if rule is None else rule.kind
        why = _UNKNOWN if rule is None else rule.says
        written: Written = {}
        try:
            if value == "auto" or is_open:
                kind, why = "no counterpart", _AUTO if value == "auto" else _UNDER_AUTO
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
        if not written:
            why = why if kind != "is" or value else "it asks for nothing"
            told = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", why).replace("`", "")
            made.remark(_section(key, library), key, value, told if kind == "no counterpart" else f"not needed: {told}")
    for key, why in source.lacks:
        made.keys["no counterpart"].append(key)
        made.remark(_section(key, library), key, None, why)
    for target, value in library.defaults(source).items():
        if not made.has(target):
            made.write({target: value}, f"{library.name}'s default")


def one_line(text: str) -> str:
    """Text of another person's file as a part of a line, in a comment or on a terminal."""
    return escaped(text).replace("\n", "\\n")


def _leaves(
    tables: Mapping[str, Any], rules: Mapping[str, Rule], above: str = "", is_open: bool = False
) -> Iterator[tuple[str, Any, bool]]:
    """Yield each key with its value, and whether its table's switch is "auto"; a table that is switched off has only the switch."""
    for name, value in tables.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping):
            # DeepSpeed's tables with a switch are off without it
            if not value.get("enabled", f"{key}.enabled" not in rules):
                yield (f"{key}.enabled" if f"{key}.enabled" in rules else key), False, is_open
                continue
            if key not in rules:
                yield from _leaves(value, rules, f"{key}.", value.get("enabled") == "auto")
                continue
        yield key, value, is_open


def _section(key: str, library: Library) -> str:
    return next((table for begin, table in library.sections.items() if key.startswith(begin)), "")


def _place(target: str) -> tuple[str, str]:
    """The table and the key of "sharding.stage", "logger:wandb.project" or "logger:csv"."""
    if target.startswith("logger:") and "." not in target:
        return target, ""
    table, _, key = target.rpartition(".")
    return table, key


def _assigned(key: str, value: Any) -> str:
    return f"{tomli_w.dumps({key: 0}).removesuffix(' = 0' + chr(10))} = {_literal(value)}"


def _literal(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(_assigned(name, one) for name, one in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").removesuffix("\n")
