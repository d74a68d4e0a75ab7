"""Finds plugin modules (entry points of the group `hpctrain`, `[plugins] load`) and checks each of them.

An unusable module becomes a `Fault` instead of an exception: the job may not need it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType

import pluggy

from hpctrain.plugins.entry_points import ModuleSource, entry_points, imported, usable_module
from hpctrain.plugins.hookspecs import PROJECT, LifeCycleHooks, RegistrationHooks
from hpctrain.plugins.members import near_hook
from hpctrain.version import API_VERSION


@dataclass(frozen=True)
class Fault:
    """An unused plugin module, and the reason."""

    source: ModuleSource
    state: str
    """"broken" or "blocked"."""

    why: str
    key: tuple[str, str] | None = None
    """The slot and the name of the one plugin that it is about; None for the whole module."""

    def is_about(self, slot: str, name: str) -> bool:
        """Whether the plugin with this name is unusable; of a whole module, the entry point's name says which it would provide."""
        return self.key == (slot, name) or (self.key is None and self.source.entry_point == f"{slot}.{name}")


def new_manager() -> pluggy.PluginManager:
    """A plugin manager with the hooks and no plugins."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(RegistrationHooks)
    manager.add_hookspecs(LifeCycleHooks)
    return manager


def load(
    manager: pluggy.PluginManager, modules: Sequence[str], block: Sequence[str], left_out: Collection[str] = ()
) -> tuple[list[ModuleSource], list[Fault]]:
    """Register every plugin module on `manager`; return the faults of modules that cannot be registered.

    `block` holds entry point names, module names or distribution names. left_out: slots of which first-party modules, whose entry
    points are named by their slot, are not imported.
    """
    found = (source for source in entry_points() if source.command is None)
    sources = sorted(found, key=lambda s: (s.distribution, s.entry_point))
    sources = [one for one in sources if one.distribution != PROJECT or one.slot not in left_out]
    known = {source.module for source in sources}
    sources += [ModuleSource(module) for module in modules if module not in known]
    active: list[ModuleSource] = []
    faults: list[Fault] = []
    for source in sources:
        if source.names & set(block):
            faults.append(Fault(source, "blocked", "it is listed in [plugins] block"))
            continue
        why = _register(manager, source)
        if why is None:
            active.append(source)
        else:
            faults.append(Fault(source, "broken", why))
    return active, faults


def _register(manager: pluggy.PluginManager, source: ModuleSource) -> str | None:
    """Import and register one module; return a sentence if that fails."""
    module = usable_module(source, imported if source.distribution else import_from_here)
    if isinstance(module, str):
        return module
    return hook_fault(manager, module) or _register_hooks(manager, module, source)


def _register_hooks(manager: pluggy.PluginManager, module: ModuleType, source: ModuleSource) -> str | None:
    try:
        manager.register(module, name=source.key)
    except (pluggy.PluginValidationError, ValueError) as error:
        return str(error)
    return None


def hook_fault(manager: pluggy.PluginManager, module: object) -> str | None:
    """Compare the hook implementations of a module or an object with the specifications before pluggy sees them."""
    found = [name for name in dir(module) if manager.parse_hookimpl_opts(module, name) is not None]
    hooks = [name for name in vars(manager.hook) if name.startswith(f"{PROJECT}_")]
    of = module if isinstance(module, ModuleType) else type(module)
    unmarked = [
        name for name in hooks if name not in found and isinstance(inspect.getattr_static(of, name, None), FunctionType)
    ]
    if unmarked:
        return f"it has the function {unmarked[0]!r} without the mark of hpctrain.api.hookimpl, so nobody calls it"
    if not found:
        return "it implements no hook: expected functions marked with hpctrain.api.hookimpl"
    for name in found:
        caller = getattr(manager.hook, name, None)
        if caller is None or caller.spec is None:
            near = near_hook(name, hooks)
            hint = f"; did you mean {near!r}?" if near else ""
            return f"it implements the hook {name!r}, which does not exist in plugin API version {API_VERSION}{hint}"
        expected, actual = caller.spec.argnames, list(inspect.signature(getattr(module, name)).parameters)
        extra = [argument for argument in actual if argument not in expected]
        if extra:
            return f"hook {name}: expected arguments among ({', '.join(expected)}), found ({', '.join(actual)})"
    return None


_left: set[str] = set()
"""The directories that have been current ones: a program may change to another."""


def import_from_here(module: str) -> ModuleType:
    """Import a module that the job names, also from the current directory: behind all that is installed, since others may be able
    to write there. Raises ImportError where an installed module has the name of one there."""
    here = Path.cwd()
    if str(here) not in sys.path:
        sys.path[:] = [*(one for one in sys.path if one not in _left), str(here)]
        _left.add(str(here))
    near = here.joinpath(*module.split("."))
    if near.with_suffix(".py").exists() or (near / "__init__.py").exists():
        top = module.partition(".")[0]
        with suppress(ValueError):  # of a module that was made by hand
            spec = find_spec(top)
            places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or [])]
            are_here = [
                Path(one).resolve().is_relative_to(here.resolve()) for one in places if one and one.startswith("/")
            ]
            if places and not any(are_here):
                raise ImportError(
                    f"{module} is in the current directory, but {top} is the module {places[0]}: rename it"
                )
    return imported(module)
