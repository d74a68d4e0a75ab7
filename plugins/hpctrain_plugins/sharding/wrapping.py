"""Which modules stage 3 gathers and frees as a whole."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from torch import nn

from hpctrain.api import ModelSpec, UsageError

LOG = logging.getLogger("hpctrain")


def units_of(module: nn.Module, spec: ModelSpec, wrap: str, min_parameters: int) -> list[nn.Module]:
    """The units below `module`, in the order of forward; what is in none of them belongs to `module` itself.

    A module that shares a parameter with one outside of it can't be a unit: the parameter would be cut twice.
    """
    if wrap == "block":
        found = spec.blocks(module)
        if not found:
            LOG.warning(
                '[sharding] wrap = "block": the model %r names no blocks, so all of it is gathered at once; '
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
    found = [one for one in module.modules() if type(one).__name__ == name]
    if not found:
        classes = sorted({type(one).__name__ for one in module.modules()})
        raise UsageError(
            f"[sharding] wrap: no module is a {name!r}; the model is made of {', '.join(classes)}", everywhere=True
        )
    return found


def _by_size(module: nn.Module, minimum: int) -> Iterator[nn.Module]:
    """The smallest modules that have at least `minimum` parameters outside of smaller units."""

    def rest_of(one: nn.Module) -> int:
        rest = sum(p.numel() for p in one.parameters(recurse=False)) + sum(rest_of(child) for child in one.children())
        if rest < minimum or isinstance(one, (nn.ModuleList, nn.ModuleDict)):  # a container has no forward
            return rest
        units.append(one)
        return 0

    units: list[nn.Module] = []
    rest_of(module)
    yield from units


def _shares(unit: nn.Module, module: nn.Module) -> bool:
    """Whether a parameter of `unit` is also held by a module outside of it."""
    inside, own = set(unit.modules()), set(unit.parameters())
    return any(
        parameter in own
        for outside in module.modules()
        if outside not in inside
        for parameter in outside.parameters(recurse=False)
    )
