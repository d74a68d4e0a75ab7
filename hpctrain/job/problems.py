"""The problems of a job, each with its place in the file, reported together."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from hpctrain.base.errors import EXIT_USAGE, HpctrainError, JobFileError, UsageError
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
        """A problem whose sentence starts with its key: "[batch] tokens: why"."""
        return PlacedProblem(key, f"{dotted(key)}: {why}", exit_code)


class JobError(HpctrainError):
    """All problems of a job, a line each: `file:line: message`."""

    def __init__(self, raw: RawJob, problems: Sequence[PlacedProblem]) -> None:
        self.problems = list(problems)
        self.exit_code = min(p.exit_code for p in problems)  # bad usage (2) before a missing package (3)
        super().__init__("\n".join(dict.fromkeys(f"{raw.place(p.key)}: {p.message}" for p in problems)))


@contextmanager
def collecting(key: Key, problems: list[PlacedProblem]) -> Iterator[None]:
    """Turn a UsageError in the block into a problem at `key`."""
    try:
        yield
    except UsageError as error:
        problems.append(PlacedProblem(key, str(error)))


def sentence(error: HpctrainError) -> str:
    """The error as printed: a job's problems start with file:line, for editors; all others with the program's name."""
    return str(error) if isinstance(error, (JobError, JobFileError)) else f"hpctrain: {error}"


def validate(model: type[BaseModel], values: dict[str, Any]) -> BaseModel:
    """Validate `values` with TOML's strict types: "1" is no number, 1 is no text."""
    # from JSON: strict validation of Python's values would refuse a text as a Path and a list as a tuple
    return model.model_validate_json(json.dumps(values, default=str), strict=True)


def problems_of(
    error: ValidationError,
    prefix: Key,
    tables: Any,
    keys: Callable[[Key], Sequence[str]],
    owners: Callable[[str], str | None] = lambda _: None,
) -> list[PlacedProblem]:
    """pydantic's errors as sentences. keys: gives the keys of a table by its place below `prefix`.

    owners: names what takes a key that this table doesn't know, as "an option of ...".
    """
    return [_problem(item, prefix, tables, keys, owners) for item in error.errors(include_url=False)]


def _problem(
    item: Any, prefix: Key, tables: Any, keys: Callable[[Key], Sequence[str]], owners: Callable[[str], str | None]
) -> PlacedProblem:
    place, name = _existing((*prefix, *item["loc"]), tables), item["loc"][-1] if item["loc"] else ""
    if item["type"] == "missing" and isinstance(name, int):
        values = json.dumps(item["input"], default=str)
        return PlacedProblem.at(place, f"expected at least {name + 1} values, found {values}")
    if item["type"] == "missing":
        what = f"lacks the key {name!r}" if place else f"lacks the table [{name}]"
        return PlacedProblem(place, f"{dotted(place)} {what}; add it")
    if item["type"] == "extra_forbidden":
        table = (*prefix, *item["loc"][:-1])
        return PlacedProblem((*table, name), unknown_key(name, table, keys(item["loc"][:-1]), owners(name)))
    message = item["msg"].removeprefix("Value error, ").replace("Input should be", "expected")  # pydantic's words
    message = message.replace("a valid boolean", "true or false")  # TOML's names
    if item["type"] == OF_SEVERAL_KEYS:
        return PlacedProblem.at(place, message)
    return PlacedProblem.at(place, f"{message}, found {written(item['input'])}")


def unknown_key(name: str, table: Key, keys: Sequence[str], owners: str | None = None) -> str:
    """The sentence for an unknown key, with the plugin that takes it or the most similar of the table's `keys`."""
    near = difflib.get_close_matches(name, keys, n=1, cutoff=0.5)
    listed = f"known are {', '.join(sorted(keys))}" if keys else "it takes no keys"
    hint = owners or (f"did you mean {near[0]!r}?" if near else listed)
    where = f" in {dotted(table)}" if table else ""
    return f"unknown key {name!r}{where}; {hint}"


def keys_below(model: type[BaseModel], own: Sequence[str], below: Key) -> list[str]:
    """The keys of the table of `model` and further ones of its `own`; or those of a table `below` it."""
    if not below:
        return [*model.model_fields, *own]
    for key in below:
        model = model if isinstance(key, int) else inner_table(model, key)  # a number is a row of a list of tables
    return list(model.model_fields)


def inner_table(model: type[BaseModel], key: str) -> type[BaseModel]:
    """The model of the tables below `key`; BaseModel where there are none."""
    annotation = model.model_fields[key].annotation if key in model.model_fields else None
    # the annotation itself, or what a dict, list or union holds; __origin__ takes Annotated off
    kinds = [getattr(kind, "__origin__", kind) for kind in (annotation, *get_args(annotation))]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), BaseModel)


def _existing(key: Key, tables: Any) -> Key:
    """`key` up to the first part that is not in the file: pydantic adds the names of union members."""
    for length, part in enumerate(key):
        try:
            tables = tables[part]
        except (KeyError, IndexError, TypeError):
            return key[:length]
    return key
