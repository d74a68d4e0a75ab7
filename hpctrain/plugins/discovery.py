"""Finds plugin modules (entry points of the group `hpctrain`, `[plugins] load`) and checks each of them.

An unusable module becomes a `Fault` instead of an exception: the job may not need it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
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
    manager: pluggy.PluginManager, modules: Sequence[str], block: Sequence[str]
) -> tuple[list[ModuleSource], list[Fault]]:
    """Register every plugin module on `manager`; return the faults of modules that cannot be registered.

    `block` holds entry point names, module names or distribution names.
    """
    found = (source for source in entry_points() if source.command is None)
    sources = sorted(found, key=lambda s: (s.distribution, s.entry_point))
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


def import_from_here(module: str) -> ModuleType:
    """Import a module that the job names, also from the current directory: behind all that is installed, since others may be able
    to write there. Raises ImportError where a module there has the name of an installed one."""
    here, top = Path.cwd(), module.partition(".")[0]
    if str(here) not in sys.path:
        sys.path.append(str(here))
    found = imported(module)
    file = getattr(sys.modules.get(top), "__file__", None)
    near = [one for one in (here / f"{top}.py", here / top / "__init__.py") if one.exists()]
    if near and file is not None and not any(one.samefile(file) for one in near):
        raise ImportError(
            f"{near[0].name} in the current directory has the name of an installed module, {file}: rename it"
        )
    return found
