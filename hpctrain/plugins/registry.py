"""The registry: usable plugin classes by slot and name, and the faults of unusable ones."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pluggy
from pydantic import ValidationError

from hpctrain.contracts.plugin import Plugin
from hpctrain.errors import EnvironmentUnfitError, UsageError
from hpctrain.plugins.discovery import Fault, ModuleSource, load, new_manager
from hpctrain.plugins.slots import SLOTS, Slot, table_class

_HUB = '; names of the Hugging Face hub are not taken: name a function that loads it, as "package.module:function"'


@dataclass(frozen=True)
class Registered:
    """One plugin: its class and its origin."""

    slot: Slot
    cls: type[Plugin]
    source: ModuleSource


@dataclass
class Registry:
    """The installed plugins. faults: unusable modules. conflicts: names that two modules claim."""

    manager: pluggy.PluginManager
    entries: dict[tuple[str, str], Registered] = field(default_factory=dict)
    sources: list[ModuleSource] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    conflicts: dict[tuple[str, str], list[ModuleSource]] = field(default_factory=dict)

    def names(self, slot: str) -> list[str]:
        """The names that the job file may use in `slot`."""
        return sorted(name for kind, name in self.entries if kind == slot)

    def made(self, slot: str) -> list[Any]:
        """The plugins of `slot` that can be created without options, by name."""
        plugins = []
        for (kind, _), entry in sorted(self.entries.items(), key=lambda one: one[0]):
            if kind == slot:
                try:
                    plugins.append(self.make(entry.cls, entry.cls.Options()))
                except ValidationError:
                    continue  # it has required options: only a job that names it can use it
                except Exception as error:  # a third party's code
                    self.faults.append(
                        Fault(entry.source, "broken", f"making it raised {type(error).__name__}: {error}")
                    )
        return plugins

    def make(self, cls: Any, options: Any) -> Any:
        """A plugin with its options and the plugins that they choose. Raises UsageError for an unknown plugin."""
        chosen = {option: self.find(slot, getattr(options, option)).cls for option, slot in cls.chooses.items()}
        made = {option: self.make(one, one.Options()) for option, one in chosen.items()}
        return cls(options, made) if cls.chooses else cls(options)

    def find(self, slot: str, name: str) -> Registered:
        """The plugin. Raises UsageError for an unknown name, EnvironmentUnfitError for an unusable plugin."""
        if (slot, name) in self.conflicts:
            both = " and ".join(map(str, self.conflicts[slot, name]))
            raise EnvironmentUnfitError(
                f"{slot} plugin {name!r} is claimed by {both}; expected one: uninstall one, or block it with "
                f'[plugins] block = ["{self.conflicts[slot, name][-1].module}"]'
            )
        entry = self.entries.get((slot, name))
        if entry is not None:
            return entry
        for fault in self.faults:
            if fault.source.entry_point == f"{slot}.{name}":
                raise EnvironmentUnfitError(f"{slot} plugin {name!r} is {fault.state}: {fault.source}: {fault.why}")
        near = difflib.get_close_matches(name, self.names(slot), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        of_hub = _HUB if slot in ("model", "dataset") and not near else ""
        known = ", ".join(self.names(slot)) or "none"
        raise UsageError(f"no installed plugin provides the {slot} {name!r}{hint} (installed: {known}){of_hub}")


def build_registry(modules: Sequence[str] = (), block: Sequence[str] = ()) -> Registry:
    """Load every plugin. Raises EnvironmentUnfitError for a broken module of `modules`, which the job asks for."""
    manager = new_manager()
    sources, faults = load(manager, modules, block)
    registry = Registry(manager, sources=sources, faults=faults)
    by_plugin = {source.key: source for source in sources}
    for slot in SLOTS.values():
        for hook in getattr(manager.hook, slot.hook).get_hookimpls():
            _collect(registry, slot, by_plugin[hook.plugin_name], hook.function)
    for fault in registry.faults:
        if fault.state == "broken" and fault.source.module in modules:
            raise EnvironmentUnfitError(f"[plugins] load: {fault.source}: {fault.why}")
    return registry


def _collect(registry: Registry, slot: Slot, source: ModuleSource, function: object) -> None:
    """Call one registration hook of one module, so that a failure affects only that module."""
    try:
        classes = function()  # type: ignore[operator]
    except Exception as error:  # a third party's code: its failure becomes a fault, not a traceback
        registry.faults.append(Fault(source, "broken", f"hook {slot.hook} raised {type(error).__name__}: {error}"))
        return
    if not isinstance(classes, (list, tuple)):
        why = f"hook {slot.hook}: expected a list of {slot.contract.__name__} classes, found {classes!r}"
        registry.faults.append(Fault(source, "broken", why))
        return
    for cls in classes:
        fault = _class_fault(slot, cls)
        if fault is not None:
            registry.faults.append(Fault(source, "broken", fault))
            continue
        key = (slot.name, cls.name)
        if key in registry.entries or key in registry.conflicts:
            first = registry.entries.pop(key, None)
            registry.conflicts.setdefault(key, [first.source] if first else []).append(source)
        else:
            registry.entries[key] = Registered(slot, cls, source)


def _class_fault(slot: Slot, cls: object) -> str | None:
    """The reason why `cls` cannot be a plugin of `slot`."""
    expected = f"hook {slot.hook}: expected subclasses of {slot.contract.__name__}"
    if not isinstance(cls, type) or not issubclass(cls, slot.contract):
        return f"{expected}, found {cls!r}"
    if not isinstance(getattr(cls, "name", None), str) or not cls.name:
        return f"{expected} with a `name`, and {cls.__qualname__} has none"
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        return f"{expected}, and {cls.__qualname__} ({cls.name}) lacks {', '.join(missing)}"
    taken = sorted({} if slot.inner else table_class(slot).model_fields.keys() & cls.Options.model_fields.keys())
    if taken:
        return f"{expected}, and {cls.__qualname__} ({cls.name}) has the options {', '.join(taken)}, which are keys of the core's"
    return None
