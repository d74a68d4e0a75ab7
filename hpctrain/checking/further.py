"""Looks behind a job's first problems: with stand-ins for the wrong values, the rest of the job can be checked, too."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from hpctrain.base.errors import HpctrainError
from hpctrain.checking.stand_ins import has_stand_in, is_caused, with_stand_in
from hpctrain.job.problems import JobError, PlacedProblem
from hpctrain.job.reading import Key, RawJob
from hpctrain.plugins.registry import Registry

_STAND_INS: tuple[Any, ...] = (None, 1, "x", ["x"])
"""Values that replace a wrong one, in this order; None removes the key, so that its default holds."""

Check = Callable[[RawJob], object]


def further_problems(
    raw: RawJob, found: Sequence[PlacedProblem], first: Check, rest: Check, registry: Registry
) -> list[PlacedProblem]:
    """The problems behind `found` in the same job. Empty if a wrong value has no stand-in.

    first, rest: raise JobError; `first` with the problems of single values only.
    """
    bad = list(dict.fromkeys(_replaced(problem.lacks or problem.key) for problem in found))
    tables = raw.tables
    for key in sorted(
        bad, key=str, reverse=True
    ):  # rows of lists from the last one, so that the others keep their places
        candidates = [*_repairs(tables, key), *with_stand_in(tables, key, registry)]
        repaired = next((one for one in candidates if not _is_wrong(one, key, first)), None)
        if repaired is None:
            return []
        tables = repaired
    about = [key[:1] if _is_row(key) else key for key in bad if not has_stand_in(key)]
    return [
        one
        for one in _problems(tables, rest)
        if not is_caused(one, tables) and not any(_is_within(one.key, key) for key in about)
    ]


def _is_row(key: Key) -> bool:
    """Whether it is in a list of tables."""
    return len(key) > 1 and isinstance(key[1], int)


def _replaced(key: Key) -> Key:
    """The key that a stand-in replaces: a row of a list of tables as a whole."""
    return key[:2] if _is_row(key) else key


def _is_within(key: Key, other: Key) -> bool:
    """Whether one of both is the other one or a part of it."""
    return key[: len(other)] == other or other[: len(key)] == key


def _repairs(tables: dict[str, Any], key: Key) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for value in _STAND_INS if key else ():  # a problem of the whole job has no stand-in
        changed = copy.deepcopy(tables)
        inner: Any = changed
        for part in key[:-1]:
            inner = inner.get(part) if isinstance(inner, dict) else None
        if not isinstance(inner, (dict, list)):
            return []
        if value is not None:
            inner[key[-1]] = value  # type: ignore[index]
        elif isinstance(inner, list) or key[-1] in inner:
            del inner[key[-1]]  # type: ignore[arg-type]
        else:
            continue  # a key that is missing
        found.append(changed)
    return found


def _is_wrong(tables: dict[str, Any], key: Key, first: Check) -> bool:
    return any(_is_within(problem.lacks or problem.key, key) for problem in _problems(tables, first))


def _problems(tables: dict[str, Any], check: Check) -> list[PlacedProblem]:
    try:
        check(RawJob(tables, {}, ""))
    except JobError as error:
        return error.problems
    except HpctrainError:
        pass  # of a plugin that a stand-in has led astray
    return []
