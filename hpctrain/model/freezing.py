"""Selects the parameters that are trained."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from hpctrain.base.errors import UsageError


def freeze(module: nn.Module, frozen: Sequence[str], trainable: Sequence[str] | None) -> None:
    """Freeze all parameters that are not in `trained_names`. Raises its UsageErrors."""
    trained = set(trained_names(module, frozen, trainable))
    for name, parameter in module.named_parameters():
        if name not in trained:
            parameter.requires_grad_(False)


def trained_names(module: nn.Module, frozen: Sequence[str], trainable: Sequence[str] | None) -> list[str]:
    """The names of trained parameters: they match a pattern of `trainable` (None: all) and no pattern of `frozen`.

    Raises UsageError if a pattern matches no parameter, or if no parameter is left.
    """
    parameters = list(module.named_parameters())
    for key, patterns in (("freeze", frozen), ("trainable", trainable or ())):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name, _ in parameters):
                names = ", ".join(name for name, _ in parameters[:5])
                raise UsageError(f"[model] {key}: no parameter matches {pattern!r}; the names are like {names}, ...")
    trained = [
        name
        for name, parameter in parameters
        if parameter.requires_grad
        and (trainable is None or any(fnmatchcase(name, pattern) for pattern in trainable))
        and not any(fnmatchcase(name, pattern) for pattern in frozen)
    ]
    if (frozen or trainable is not None) and not trained:
        key = "freeze" if frozen else "trainable"
        raise UsageError(f"[model] {key}: every parameter is frozen, expected at least one to train")
    return trained
