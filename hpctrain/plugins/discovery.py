"""Finds plugin modules (entry points of the group `hpctrain`, `[plugins] load`) and checks each of them.

An unusable module becomes a `Fault` instead of an exception: the job may not need it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType

import pluggy

from hpctrain.hookspecs import PROJECT, LifeCycleHooks, RegistrationHooks
from hpctrain.horovod.alias import offer
from hpctrain.plugins.changes import API_VERSION
from hpctrain.plugins.members import Package, near_hook, unmarked_hooks


@dataclass(frozen=True)
class ModuleSource:
    """The origin of a plugin module."""

    module: str
    distribution: str = ""
    version: str = ""
    entry_point: str = ""
    """The entry point's name; by convention "slot.name", so that a broken module still shows what it would provide."""

    @property
    def key(self) -> str:
        """The module's name in pluggy."""
        return f"{self.distribution}:{self.entry_point}" if self.distribution else self.module

    @property
    def chooser(self) -> str:
        """The widest of its names in [plugins] prefer."""
        return self.distribution or self.module

    @property
    def names(self) -> set[str]:
        """The module's names in [plugins] block and prefer."""
        return {name for name in (self.entry_point, self.module, self.distribution) if name}

    def __str__(self) -> str:
        if not self.distribution:
            return f"{self.module} ([plugins] load)"
        return f"{self.module} ({self.distribution} {self.version}, entry point {self.entry_point!r})"


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


def entry_points() -> Iterator[ModuleSource]:
    """Every installed entry point of the group, in a fixed order. A distribution found twice counts once."""
    seen = set()
    for distribution in importlib.metadata.distributions():
        points = [point for point in distribution.entry_points if point.group == PROJECT]
        if not points:
            continue  # most have none, and their metadata is long
        metadata = distribution.metadata  # parsed anew each time
        name = metadata["Name"]
        for point in points:
            if (name, point.name) not in seen:
                seen.add((name, point.name))
                yield ModuleSource(point.value, name, metadata["Version"], point.name)


def load(
    manager: pluggy.PluginManager, modules: Sequence[str], block: Sequence[str]
) -> tuple[list[ModuleSource], list[Fault]]:
    """Register every plugin module on `manager`; return the faults of modules that cannot be registered.

    `block` holds entry point names, module names or distribution names.
    """
    sources = sorted(entry_points(), key=lambda s: (s.distribution, s.entry_point))
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
    try:
        module = import_from_here(source.module) if not source.distribution else imported(source.module)
    except ImportError as error:
        missing = getattr(error, "name", None)
        if missing and missing != source.module and not source.module.startswith(f"{missing}."):
            return f"it needs the package {missing!r}, which is not installed ({error})"
        return f"the module cannot be imported: {error}"
    except Interrupted:
        raise
    except RAISED as error:  # a third party's import must not end the command
        return f"importing it raised {type(error).__name__}: {error}"
    wanted = version_of(module)
    if wanted is not None and (type(wanted) is not int or wanted > API_VERSION):
        return f"it asks for plugin API version {wanted!r}, and this hpctrain has version {API_VERSION}: install a newer hpctrain"
    return hook_fault(manager, module) or _register_hooks(manager, module, source)


def version_of(module: ModuleType) -> int | None:
    """The version of the plugin interface that the module says it was written for."""
    return getattr(module, "HPCTRAIN_API", None)


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
    unmarked = unmarked_hooks(of, hooks, Package(module.__name__ if isinstance(module, ModuleType) else of.__module__))
    if unmarked:
        return "; ".join(unmarked)
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
    """Import a module that the job names, also from the current directory, as `python -m` does. It may import `horovod`."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    offer()
    return imported(module)


RAISED = (Exception, SystemExit, GeneratorExit, KeyboardInterrupt)
"""Exceptions that a module of somebody else's may raise at its import."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during an import, in contrast to a module that raises KeyboardInterrupt itself."""


def imported(module: str) -> ModuleType:
    """Import a module of somebody else's. Raises Interrupted, and whatever the module raises."""
    answered = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not answered or threading.current_thread() is not threading.main_thread():
        return importlib.import_module(module)
    signal.signal(signal.SIGINT, _interrupt)
    try:
        return importlib.import_module(module)
    finally:
        if signal.getsignal(signal.SIGINT) is _interrupt:  # the module may have taken the signal
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted
