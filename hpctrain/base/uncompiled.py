"""Functions that torch.compile leaves alone, such as those that communicate."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _LeftAlone:
    """A function, and what is called in its place: itself, or what torch makes of it once something is compiled."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.called = function

    def leave_alone(self) -> None:
        self.called = torch.compiler.disable(self.called)


_functions: list[_LeftAlone] = []
_states = {"compiles": False}


def uncompiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Keep `[compile]` out of a function: graphs end before it and begin again after it.

    A decorator, in place of `torch.compiler.disable`, which loads the compiler at once: two seconds of each command.
    """
    one = _LeftAlone(function)
    _functions.append(one)
    if _states["compiles"]:
        one.leave_alone()

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        result: Result = one.called(*args, **kwargs)
        return result

    return call


def leave_out_of_graphs() -> None:
    """Tell torch's compiler of all such functions; called before something is compiled."""
    if not _states["compiles"]:
        _states["compiles"] = True
        for one in _functions:
            one.leave_alone()
