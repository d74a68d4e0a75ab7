"""Finds the units of stage 3: the modules that it gathers and frees as a whole."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.api import ModelSpec, UsageError

LOG = logging.getLogger("hpctrain")

# containers have no forward that could gather them
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
# modules whose forward uses the parameters of a child without calling the child
_INDIVISIBLE = nn.MultiheadAttention


def units_of(module: nn.Module, spec: ModelSpec, wrap: str, min_parameters: int) -> list[nn.Module]:
    """The units below `module`, in the order of forward. All other parameters belong to `module` itself.

    A module that shares a parameter with a module outside of it can't be a unit: the parameter would be cut twice.
    """
    if wrap == "block":
        found = spec.blocks(module)
        if not found:
            LOG.warning(
                '[sharding] wrap = "block": the model %r has no blocks, so all of it is gathered at once; '
                'wrap = "size" or "class:NAME" cuts it',
                spec.name,
            )
    elif wrap == "size":
        found = list(_by_size(module, min_parameters))
    else:
        found = _by_class(module, wrap.removeprefix("class:"))
    chosen = {id(one) for one in found if one is not module and not _shares(one, module)}
    return [one for one in module.modules() if id(one) in chosen]


def _by_class(module: nn.Module, name: str) -> list[nn.Module]:
    # a precision may have replaced modules by modules of a subclass
    found = [one for one in module.modules() if any(cls.__name__ == name for cls in type(one).__mro__)]
    if not found:
        classes = sorted({type(one).__name__ for one in module.modules()})
        raise UsageError(f"[sharding] wrap: no module is a {name!r}; the model is made of {', '.join(classes)}")
    if isinstance(found[0], _WITHOUT_FORWARD):
        raise UsageError(
            f"[sharding] wrap: a {name} has no forward before which it could be gathered; name the class of its children"
        )
    return found


def refuse_unseen(kind: str, unit: nn.Module, inputs: Any, output: Any) -> None:
    """A forward hook for a unit of class `kind`. Raises UsageError if torch finds no tensor in its output: it would not gather
    the unit in backward."""
    seen = isinstance(output, (Tensor, tuple, list, dict)) or is_dataclass(output)
    if torch.is_grad_enabled() and not seen and any(p.requires_grad for p in unit.parameters()):
        raise unseen(f"a {kind} returns a {type(output).__name__}")


def unseen(found: str) -> UsageError:
    """The error for a unit that backward would miss."""
    return UsageError(
        f"[sharding] stage = 3: {found}; expected a tensor, or a tuple, list, dict or dataclass with tensors, whose backward "
        "triggers gathering and summing; return one of these, or use stage = 2"
    )


def _by_size(module: nn.Module, minimum: int) -> Iterator[nn.Module]:
    """The smallest modules with at least `minimum` parameters outside of smaller units."""

    def rest_of(one: nn.Module) -> int:
        if isinstance(one, _INDIVISIBLE):
            rest = sum(p.numel() for p in one.parameters())
        else:
            rest = sum(p.numel() for p in one.parameters(recurse=False)) + sum(map(rest_of, one.children()))
        if rest < minimum or isinstance(one, _WITHOUT_FORWARD):
            return rest
        units.append(one)
        return 0

    units: list[nn.Module] = []
    rest_of(module)
    yield from units


def _shares(unit: nn.Module, module: nn.Module) -> bool:
    """Whether a parameter of `unit` is also held by a module outside of it, which may be a part of `unit` that is shared itself."""
    own, everywhere = set(unit.parameters()), list(module.named_modules(remove_duplicate=False))
    inside = tuple(f"{path}." for path, one in everywhere if one is unit)
    return any(
        parameter in own
        for path, one in everywhere
        if not f"{path}.".startswith(inside)
        for parameter in one.parameters(recurse=False)
    )
