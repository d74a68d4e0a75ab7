"""Resolving "package.module:callable"."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable
from typing import Any

from hpctrain.base.errors import UsageError
from hpctrain.plugins.discovery import import_from_here
from hpctrain.plugins.entry_points import RAISED

OBJECTS = "python"
"""The module's name in a reference to an object that a Python program gave to `hpctrain.run`."""
GIVEN: dict[str, Any] = {}
"""Objects of the user's, while their run lasts."""


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
        found: Any = import_from_here(module_name)
    except RAISED as error:  # the user's module may raise anything at import
        raise UsageError(f"{reference}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            raise UsageError(
                f"{reference}: {module_name} has no {path!r}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{reference}: expected something callable, found {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def resolve_for(what: str, reference: str, argument: str) -> Callable[[Any], Any]:
    """A function of one argument; UsageError that begins with `what` if it can't be called so."""
    try:
        found = resolve(reference)
        if inspect.isclass(found):
            raise UsageError(f"{reference} is a class, expected a function of {argument}, or an object to call so")
        inspect.signature(found).bind(None)
    except UsageError as error:
        raise UsageError(f"{what}: {error}") from None
    except TypeError as error:
        raise UsageError(f"{what}: it is called with {argument}: {error}") from None
    except ValueError:
        pass  # a builtin without a signature: the call itself will fail
    return found


def refuse_arguments(reference: str, function: Callable[..., Any], given: dict[str, Any], *positional: object) -> None:
    """UsageError when `function(*positional, **given)` would not be a valid call."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin without a signature: the call itself will fail
    known = [p.name for p in signature.parameters.values() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for name in given:
        if name not in known and not open_ended:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known) or 'none'}"
            raise UsageError(f"{reference} takes no argument {name!r}; {hint}")
    try:
        signature.bind(*positional, **given)
    except TypeError as error:
        raise UsageError(f"{reference}: {error}; its arguments are the other keys of this table") from None
