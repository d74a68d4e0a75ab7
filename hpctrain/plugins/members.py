"""Compares a plugin's class and hooks with their contracts when a module is loaded: what is missing, and what can't be called."""

from __future__ import annotations

import inspect
from difflib import get_close_matches
from functools import cached_property
from types import FunctionType
from typing import Any

_CONTRACTS = ("hpctrain.contracts.", "hpctrain.toolkit.")
_CLOSE = 0.8
"""How similar a name is to one that was meant, as difflib counts."""


def missing_members(cls: type) -> list[str]:
    """The abstract members that `cls` lacks, each with a name of the class that may be meant."""
    lacking = sorted(getattr(cls, "__abstractmethods__", ()))
    others = [name for name in dir(cls) if name[0] != "_" and name not in lacking]
    near = {name: get_close_matches(name, others, 1, _CLOSE) for name in lacking}
    return [name + (f" (it has {near[name][0]})" if near[name] else "") for name in lacking]


def unfit_members(cls: type) -> list[str]:
    """Sentences about members that override one of a contract and can't be called, or read, as the contract's is."""
    contracts = [base for base in cls.__mro__[1:] if base.__module__.startswith(_CONTRACTS)]
    members = {name: value for base in reversed(contracts) for name, value in vars(base).items() if name[0] != "_"}
    overridden = {name: inspect.getattr_static(cls, name) for name in members}
    misfits = (
        (name, _misfit(value, members[name])) for name, value in overridden.items() if value is not members[name]
    )
    return [f"`{name}` {why}" for name, why in misfits if why is not None]


def near_hook(name: str, hooks: list[str]) -> str | None:
    """The hook that resembles `name`. All names begin with "hpctrain_"."""
    bare = {hook.partition("_")[2]: hook for hook in hooks}
    found = get_close_matches(name.partition("_")[2], bare, 1, _CLOSE)
    return bare[found[0]] if found else None


def _misfit(value: Any, promised: Any) -> str | None:
    """The reason why `value` can't stand for a contract's `promised` member, as the end of a sentence."""
    if isinstance(promised, (property, cached_property)):
        return "must be a property or a value, found a method" if isinstance(value, FunctionType) else None
    if not isinstance(promised, FunctionType):
        data = not callable(promised) and not hasattr(promised, "__get__")
        return "must be a value, found a method" if data and isinstance(value, FunctionType) else None
    if isinstance(value, property) or not (callable(value) or hasattr(value, "__get__")):
        return f"must be a method, found {'a property' if isinstance(value, property) else repr(value)}"
    bound = 0 if isinstance(value, staticmethod) else 1
    function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    if not isinstance(function, FunctionType):
        return None
    expected = list(inspect.signature(promised).parameters)[1:]
    actual = inspect.signature(function, follow_wrapped=False)
    try:
        actual.bind(*[None] * (bound + len(expected)))
    except TypeError:
        taken = [one.replace(annotation=inspect.Parameter.empty) for one in actual.parameters.values()]
        shown = actual.replace(parameters=taken[bound:], return_annotation=inspect.Signature.empty)
        return f"is called with ({', '.join(expected)}), and takes {shown}"
    return None
