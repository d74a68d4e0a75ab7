"""Finds the repeated blocks of a module without a ModelSpec, and the modules before and after them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from torch import nn

from hpctrain.base.torch_private import children_of


@dataclass(frozen=True)
class Structure:
    """Names of modules. `before` and `after` are empty if the module doesn't show how values pass between its parts."""

    blocks: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def structure_of(module: nn.Module) -> Structure:
    """Find the blocks: consecutive modules of one class in an nn.ModuleList or nn.Sequential that have submodules.

    A list inside a block is part of that block. In an nn.Sequential the modules before and after the blocks are known.
    """
    blocks = tuple(_blocks(module, ""))
    if not blocks or type(module).forward is not nn.Sequential.forward:
        return Structure(blocks)
    names = tuple(
        children_of(module)
    )  # not named_children, which lists a module in several places only once, although it runs in each
    if blocks[0] not in names:
        return Structure(blocks)
    first = names.index(blocks[0])
    end = first + len(blocks)
    return Structure(blocks, names[:first], names[end:]) if names[first:end] == blocks else Structure(blocks)


def present(module: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    """The modules of these names that are on this rank; under a pipeline, others are elsewhere."""
    found = (_submodule(module, name) for name in names)
    return [one for one in found if one is not None]


def _submodule(module: nn.Module, name: str) -> nn.Module | None:
    parent, _, last = name.rpartition(".")
    return getattr(module.get_submodule(parent), last)  # type: ignore[no-any-return]


def _blocks(module: nn.Module, prefix: str) -> Iterator[str]:
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    for kind, group in groupby(module.named_children(), key=lambda entry: type(entry[1])):
        run = list(group)
        # the trainer acts on a block when it is called, so a module without a forward is no block
        calls = kind.forward is not nn.Module.forward
        if is_list and len(run) > 1 and calls and all(any(True for _ in one.children()) for _, one in run):
            yield from (prefix + name for name, _ in run)
        else:
            for name, one in run:
                yield from _blocks(one, f"{prefix}{name}.")
