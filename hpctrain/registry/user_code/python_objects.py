"""Objects of a Python program in a job: `hpctrain.run({"model": {"name": make_model, ...}, ...})`."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

import numpy as np
from torch import nn

from hpctrain.base.errors import UsageError
from hpctrain.job.raw import dotted
from hpctrain.job.toml import Key
from hpctrain.registry.slots import TABLES, table_class
from hpctrain.registry.user_code.reference import GIVEN, OBJECTS


@contextmanager
def given_objects(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The tables of a job with a reference in place of each object, which `resolve` finds inside the context.

    An importable object becomes "package.module:name"; any other one "python:NAME", which only this program knows. Raises
    UsageError for an object where a job takes none.
    """
    before = dict(GIVEN)
    try:
        yield referenced(job)
    finally:
        GIVEN.clear()
        GIVEN.update(before)  # those of a context around this one stay


def referenced(job: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with references, which `resolve` finds as long as a context of `given_objects` lasts."""
    return {name: _copied(value, (name,)) for name, value in job.items()}


def _copied(value: Any, key: Key) -> Any:
    """`value` as TOML has it, with references."""
    if _is_for_reference(key) and not isinstance(value, (str, int, float, type(None))):
        return _reference(value, key)
    if isinstance(value, Mapping):
        return {str(name): _copied(inner, (*key, name)) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied(inner, (*key, number)) for number, inner in enumerate(value)]
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, np.generic):
        return _copied(value.item(), key)  # from an array of a sweep's values
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise UsageError(
        f"{dotted(key)}: found {type(value).__name__}, expected a value as in a job file; bind an object to the function "
        "that takes it, with functools.partial"
    )


def _is_for_reference(key: Key) -> bool:
    """Whether the core resolves "package.module:callable" there: in a slot's own keys, and in the names of plugins that it holds,
    such as [dataset.sources.A] name; not in a plugin's options."""
    slot = next((slot for slot in TABLES if slot.takes_user_code and slot.name == key[0]), None)
    if slot is not None and len(key) == 4 and key[-1] == "name":
        return True
    if slot is None or len(key) != (3 if slot.many else 2):  # ("metric", 0, "name"), ("model", "loss")
        return False
    field = table_class(slot).model_fields.get(str(key[-1]))
    return field is not None and field.annotation in (str, str | None)


def _reference(value: Any, key: Key) -> str:
    name = str(getattr(value, "__qualname__", None) or type(value).__name__)
    module = sys.modules.get(str(getattr(value, "__module__", None)))
    # a worker or another rank can't import __main__ under that name; the path of a local function leads nowhere
    if module is not None and module.__name__ != "__main__" and _value_at(module, name) is value:
        return f"{module.__name__}:{name}"
    label = "".join(letter for letter in name.rpartition("<locals>.")[2] if letter.isalnum() or letter == "_") or "it"
    names = (label, *(f"{label}_{number}" for number in range(2, len(GIVEN) + 2)))
    free = next(name for name in names if name not in GIVEN)
    GIVEN[free] = _as_callable(value, key)
    return f"{OBJECTS}:{free}"


def _value_at(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part, None)
    return module


def _as_callable(value: Any, key: Key) -> Any:
    """The callable that a reference stands for."""
    place = (key[0], key[-1])
    if place == ("model", "name") and isinstance(value, nn.Module):
        return _copies_of(value)
    if place == ("metric", "name") and hasattr(value, "update") and not isinstance(value, type):
        return _copies_of(value)
    is_data = not isinstance(value, type) and (hasattr(value, "__getitem__") or hasattr(value, "__iter__"))
    if place == ("dataset", "name") and (is_data or not callable(value)):  # a data set may have a `__call__`
        splits = dict(value) if isinstance(value, Mapping) else {"train": value}
        if "train" not in splits:
            names = ", ".join(map(repr, splits)) or "none"
            raise UsageError(
                f"{dotted(key)}: found a dict with the splits {names}, expected 'train', besides it 'validation' and 'test'"
            )
        return lambda split: splits.get(split)
    if not callable(value):
        raise UsageError(f"{dotted(key)}: found {type(value).__name__}, expected a function or a class")
    return value


def _copies_of(value: Any) -> type:
    """A class whose instances are copies of `value`: a run does not change its caller's objects."""
    return type(type(value).__name__, (), {"__new__": lambda cls: copy.deepcopy(value)})
