"""Tied parameters: one parameter in several places, such as an embedding that is also the head."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def tied_parameters(module: nn.Module) -> list[list[str]]:
    """The names of each tied parameter, its main name first."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def tie(module: nn.Module, tied: Iterable[list[str]]) -> None:
    """Tie parameters again after each place got its own: all places get the first one's."""
    for first, *others in tied:
        kept = module.get_parameter(first)
        for name in others:
            path, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(path), attribute, kept)
