"""Finds plugin modules (entry points of the group `hpctrain`, `[plugins] load`) and registers the hooks of each.

An unusable module becomes a `Fault` instead of an exception: the job may not need it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pluggy

from hpctrain.contracts.plugin import Plugin
from hpctrain.registry.entry_points import ModuleSource, entry_points
from hpctrain.registry.hookspecs import PROJECT, CommandHook, LifeCycleHooks, hookspec
from hpctrain.registry.slots import SLOTS


@dataclass(frozen=True)
class Fault:
    """An unused plugin module, and the reason."""

    source: ModuleSource
    state: str
    """"broken" or "blocked"."""

    why: str
    key: tuple[str, str] | None = None
    """The slot and the name of the plugin at fault; None for the whole module."""

    def is_about(self, slot: str, name: str) -> bool:
        """Whether the plugin with this name is unusable: by the key or, for a whole module, by its entry point's name."""
        return self.key == (slot, name) or (self.key is None and self.source.entry_point == f"{slot}.{name}")


@hookspec
def _registration() -> list[type[Plugin]]:
    """The specification of each slot's registration hook, which returns plugin classes of the slot. It is called once."""
    return []


def new_manager() -> pluggy.PluginManager:
    """A plugin manager with the hooks and no plugins."""
    manager = pluggy.PluginManager(PROJECT)
    registration = dict.fromkeys((slot.hook for slot in SLOTS.values()), _registration)
    for hooks in (type("RegistrationHooks", (), registration), CommandHook, LifeCycleHooks):
        manager.add_hookspecs(hooks)
    return manager


def sources_of(modules: Sequence[str], block: Collection[str]) -> tuple[list[ModuleSource], list[Fault]]:
    """The sources of all plugin modules, and the faults of those that `block` names by entry point, module or distribution."""
    plugins = (source for source in entry_points() if source.command is None)
    # the same order on all ranks, in which hooks that communicate are called
    sources = sorted(plugins, key=lambda s: (s.distribution, s.entry_point))
    installed = {source.module for source in sources}
    sources += [ModuleSource(module) for module in modules if module not in installed]
    blocked = {source.module for source in sources if source.names & {*block}}
    why = "it is listed in [plugins] block"
    faults = [Fault(source, "blocked", why) for source in sources if source.module in blocked]
    return [source for source in sources if source.module not in blocked], faults


def register(manager: pluggy.PluginManager, part: object, name: str) -> str | None:
    """Register the hooks of a module or an object; return a sentence if they don't fit the specifications."""
    try:
        manager.register(part, name=name)
        hooks = manager.get_hookcallers(part) or []
        unknown = [caller.name for caller in hooks if not caller.has_spec()]
        if hooks and not unknown:
            return None
        why = "it implements no hook: expected functions marked with hpctrain.api.hookimpl"
    except pluggy.PluginValidationError as error:
        unknown, why = [], " ".join(str(error).split())
    except ValueError as error:  # it is registered already
        return str(error)
    manager.unregister(name=name)  # pluggy has kept the hooks before the wrong one
    if unknown:
        specified = [hook for hook, caller in vars(manager.hook).items() if getattr(caller, "spec", None) is not None]
        near = get_close_matches(unknown[0], specified, 1, 0.9)  # all are alike: they start with hpctrain_
        hint = f"; did you mean {near[0]!r}?" if near else ""
        why = f"it implements the hook {unknown[0]!r}, which does not exist{hint}"
    return why


_former: set[str] = set()  # former current directories: a program may change to another


def import_from_here(module: str) -> ModuleType:
    """Import a module that the job names, also from the current directory: behind all that is installed, since others may be able
    to write there. Raises ImportError where an installed module has the name of a file there."""
    here = Path.cwd()
    if str(here) not in sys.path:
        sys.path[:] = [*(entry for entry in sys.path if entry not in _former), str(here)]
        _former.add(str(here))
    near = here.joinpath(*module.split("."))
    if near.with_suffix(".py").exists() or (near / "__init__.py").exists():
        top = module.partition(".")[0]
        with suppress(ValueError):  # of a module that was made by hand
            spec = find_spec(top)
            places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or [])]
            files = [Path(place).resolve() for place in places if place and place.startswith("/")]
            if places and not any(file.is_relative_to(here.resolve()) for file in files):
                raise ImportError(
                    f"{module} is in the current directory, but {top} is the module {places[0]}: rename it"
                )
    return import_module(module)
