"""The problems of a job, each with its place in the file, reported together."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from hpctrain.base.errors import EXIT_USAGE, HpctrainError, JobFileError
from hpctrain.job.raw import RawJob, dotted
from hpctrain.job.table_types import OF_SEVERAL_KEYS
from hpctrain.job.toml import Key, written


@dataclass(frozen=True)
class PlacedProblem:
    """A problem at `key`."""

    key: Key
    message: str
    exit_code: int = EXIT_USAGE

    @staticmethod
    def at(key: Key, why: str, exit_code: int = EXIT_USAGE) -> PlacedProblem:
        """A problem whose sentence begins with its key: "[batch] tokens: why"."""
        return PlacedProblem(key, f"{dotted(key)}: {why}", exit_code)


class JobError(HpctrainError):
    """All problems of a job, a line each: `file:line: message`."""

    def __init__(self, raw: RawJob, problems: Sequence[PlacedProblem]) -> None:
        self.problems = list(problems)
        self.exit_code = min(p.exit_code for p in problems)
        super().__init__("\n".join(dict.fromkeys(f"{raw.place(p.key)}: {p.message}" for p in problems)))


def sentence(error: HpctrainError) -> str:
    """The error as printed: a job's problems begin with file:line, for editors; all others with the program's name."""
    return str(error) if isinstance(error, (JobError, JobFileError)) else f"hpctrain: {error}"


def validate(model: type[BaseModel], values: dict[str, Any]) -> BaseModel:
    """Validate `values` with TOML's strict types: "1" is no number, 1 is no text."""
    return model.model_validate_json(json.dumps(values, default=str), strict=True)


def problems_of(
    error: ValidationError,
    prefix: Key,
    tables: Any,
    known: Callable[[Key], Sequence[str]],
    owners: Callable[[str], str | None] = lambda _: None,
) -> list[PlacedProblem]:
    """pydantic's errors as sentences. known: gives the keys of a table, by its place below `prefix`.

    owners: says what does take a key unknown to this table, as "an option of ...".
    """
    return [_problem(item, prefix, tables, known, owners) for item in error.errors(include_url=False)]


def _problem(
    item: Any, prefix: Key, tables: Any, known: Callable[[Key], Sequence[str]], owners: Callable[[str], str | None]
) -> PlacedProblem:
    place = _existing((*prefix, *item["loc"]), tables)
    if item["type"] == "missing" and isinstance(item["loc"][-1], int):
        found = json.dumps(item["input"], default=str)
        return PlacedProblem.at(place, f"expected at least {item['loc'][-1] + 1} values, found {found}")
    if item["type"] == "missing":
        name = str(item["loc"][-1])
        what = f"lacks the key {name!r}" if place else f"lacks the table [{name}]"
        return PlacedProblem(place, f"{dotted(place)} {what}; add it")
    if item["type"] == "extra_forbidden":
        name = str(item["loc"][-1])
        table = (*prefix, *item["loc"][:-1])
        return PlacedProblem((*table, name), unknown_key(name, table, known(item["loc"][:-1]), owners(name)))
    message = item["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    message = message.replace("a valid boolean", "true or false")
    if item["type"] == OF_SEVERAL_KEYS:
        return PlacedProblem.at(place, message)
    return PlacedProblem.at(place, f"{message}, found {written(item['input'])}")


def unknown_key(name: str, table: Key, known: Sequence[str], owners: str | None = None) -> str:
    """The sentence for an unknown key, with the plugin that knows it or the most similar known key."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = owners or (
        f"did you mean {near[0]!r}?"
        if near
        else f"known are {', '.join(sorted(known))}"
        if known
        else "it takes no keys"
    )
    where = f" in {dotted(table)}" if table else ""
    return f"unknown key {name!r}{where}; {hint}"


def keys_below(model: type[BaseModel], own: Sequence[str], below: Key) -> list[str]:
    """The keys of a table of `model`, or of a table `below` it. own: further keys of the first."""
    if not below:
        return [*model.model_fields, *own]
    for key in below:
        model = model if isinstance(key, int) else inner_table(model, key)  # a number is a row of a list of tables
    return list(model.model_fields)


def inner_table(model: type[BaseModel], key: str) -> type[BaseModel]:
    """The model of the tables that a key has; BaseModel where it has none."""
    annotation = model.model_fields[key].annotation if key in model.model_fields else None
    kinds = [getattr(kind, "__origin__", kind) for kind in (annotation, *get_args(annotation))]  # without Annotated
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), BaseModel)


def _existing(key: Key, tables: Any) -> Key:
    """`key` without the parts that are not in the file (pydantic adds the names of union members)."""
    found: list[str | int] = []
    for part in key:
        try:
            tables = tables[part]
        except (KeyError, IndexError, TypeError):
            break
        found.append(part)
    return tuple(found)
