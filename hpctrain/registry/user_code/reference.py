"""Resolving "package.module:callable"."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable
from typing import Any

from hpctrain.base.errors import UsageError
from hpctrain.registry.discovery import import_from_here
from hpctrain.registry.entry_points import RAISED

OBJECTS = "python"
"""The module's name in a reference to an object that a Python program passed to `hpctrain.run`."""
GIVEN: dict[str, Any] = {}
"""The user's objects by name, while their run lasts."""


def is_reference(name: str) -> bool:
    """Whether `name` has the form "package.module:callable"."""
    return re.fullmatch(r"[\w.]+:[\w.]+", name) is not None


def resolve(reference: str) -> Callable[..., Any]:
    """The callable; UsageError with the reason if it cannot be found."""
    if not is_reference(reference):
        raise UsageError(f'expected "package.module:callable", found {reference!r}')
    module_name, _, path = reference.partition(":")
    if module_name == OBJECTS:
        if path not in GIVEN:
            raise UsageError(
                f"{reference} is an object of the Python program that trained this job; give it again: a job with the same objects"
            )
        return GIVEN[path]  # type: ignore[no-any-return]
    try:
        value: Any = import_from_here(module_name)
    except RAISED as error:  # the user's module may raise anything at import
        raise UsageError(f"{reference}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    for part in path.split("."):
        if not hasattr(value, part):
            near = difflib.get_close_matches(part, dir(value), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"{reference}: {module_name} has no {path!r}{hint}")
        value = getattr(value, part)
    if not callable(value):
        raise UsageError(f"{reference}: expected something callable, found {type(value).__name__}")
    return value  # type: ignore[no-any-return]


def resolve_for(what: str, reference: str, arguments: str, count: int = 1) -> Callable[..., Any]:
    """A function of `count` arguments; UsageError that starts with `what` if it can't be called so."""
    try:
        function = resolve(reference)
        if inspect.isclass(function):  # such as nn.CrossEntropyLoss: its call would make an object
            raise UsageError(f"{reference} is a class, expected a function of {arguments}, or an object to call so")
        inspect.signature(function).bind(*[None] * count)
    except UsageError as error:
        raise UsageError(f"{what}: {error}") from None
    except TypeError as error:
        raise UsageError(f"{what}: it is called with {arguments}: {error}") from None
    except ValueError:
        pass  # a builtin without a signature: the call itself will fail
    return function


def refuse_arguments(reference: str, function: Callable[..., Any], named: dict[str, Any], *positional: object) -> None:
    """Raise UsageError when `function(*positional, **named)` would not be a valid call."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin without a signature: the call itself will fail
    names = [p.name for p in signature.parameters.values() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for name in named:
        if name not in names and not takes_any:  # bind's own sentence offers no near name
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(names) or 'none'}"
            raise UsageError(f"{reference} takes no argument {name!r}; {hint}")
    try:
        signature.bind(*positional, **named)
    except TypeError as error:
        raise UsageError(f"{reference}: {error}; its arguments are the other keys of this table") from None
