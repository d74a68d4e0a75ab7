"""Functions that torch.compile leaves alone, such as those that communicate."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_called: dict[str, Callable[..., Any]] = {}
"""What is called for each of them, by its full name: itself, or what torch makes of it once something is compiled."""
_states = {"compiles": False}


def uncompiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Keep torch.compile out of a function: graphs end before it and begin again after it.

    A decorator, in place of `torch.compiler.disable`, which loads the compiler at once: two seconds of each command.
    """
    name = f"{function.__module__}.{function.__qualname__}"
    _called[name] = torch.compiler.disable(function) if _states["compiles"] else function

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        result: Result = _called[name](*args, **kwargs)
        return result

    return call


def leave_out_of_graphs() -> None:
    """Tell torch's compiler of all such functions; called before something is compiled."""
    if not _states["compiles"]:
        _states["compiles"] = True
        _called.update({name: torch.compiler.disable(function) for name, function in _called.items()})
