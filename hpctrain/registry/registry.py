"""The registry: usable plugin classes by slot and name, and the faults of unusable ones."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pluggy
from pydantic import ValidationError

from hpctrain.base.errors import EnvironmentUnfitError, UsageError
from hpctrain.contracts.plugin import Plugin
from hpctrain.registry.discovery import Fault, import_from_here, new_manager, register, sources_of
from hpctrain.registry.entry_points import ModuleSource, usable_module
from hpctrain.registry.slots import SLOTS, Slot, table_class

__all__ = ["build_registry"]

OWN = "hpctrain"
"""The distribution whose plugins give way to another one's of the same name."""
_HUB = '; names of the Hugging Face hub are not taken: name a function that loads it, as "package.module:function"'


@dataclass(frozen=True)
class Registered:
    """A plugin: its class and its origin."""

    cls: type[Plugin]
    source: ModuleSource


@dataclass
class Registry:
    """The installed plugins. faults: unusable modules and plugins.

    A module whose entry point is named after a plugin is imported when that plugin is asked for, or all of its slot: most jobs use
    a fourth of the modules.
    """

    manager: pluggy.PluginManager
    waiting: list[ModuleSource]
    """The modules that are not imported yet."""
    entries: dict[tuple[str, str], Registered] = field(default_factory=dict)
    sources: list[ModuleSource] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    remarks: dict[tuple[str, str], str] = field(default_factory=dict)
    """Remarks for users of a plugin, by slot and name."""
    used: set[tuple[str, str]] = field(default_factory=set)
    """The plugins that were asked for."""
    claims: dict[tuple[str, str], list[Registered]] = field(default_factory=dict)
    """Every imported plugin, by slot and name: several may claim a name, and one of them gets it."""

    def load(self, sources: Sequence[ModuleSource]) -> None:
        """Import modules that wait, and take their plugins."""
        claimed = set()
        for module in dict.fromkeys(source.module for source in sources):
            own = [source for source in self.waiting if source.module == module]  # one for each of its plugins
            self.waiting = [source for source in self.waiting if source.module != module]
            loaded = usable_module(own[0], import_module if own[0].distribution else import_from_here)
            why = loaded if isinstance(loaded, str) else register(self.manager, loaded, own[0].key)
            if why is not None:
                self.faults += [Fault(source, "broken", why) for source in own]
                continue
            self.sources.append(own[0])
            for slot in SLOTS.values():
                for hook in getattr(self.manager.hook, slot.hook).get_hookimpls():
                    if hook.plugin_name == own[0].key:
                        for plugin in self._collect(slot, own, hook.function):
                            self.claims.setdefault(key := (slot.name, plugin.cls.name), []).append(plugin)
                            claimed.add(key)
        for key in sorted(claimed):  # once all are imported: whoever comes first must not decide
            self._settle(key)

    def complete(self, *slots: str) -> None:
        """Import the waiting modules of these slots, or all."""
        self.load([source for source in self.waiting if not slots or source.entry_point.partition(".")[0] in slots])

    def notes(self) -> list[str]:
        """Sentences about the plugins that were asked for."""
        keys = sorted(self.used & self.remarks.keys())
        return [f"plugin {self.entries[key].source}: {self.remarks[key]}" for key in keys]

    def names(self, slot: str) -> list[str]:
        """The names that the job file may use in `slot`."""
        self.complete(slot)
        return sorted(name for kind, name in self.entries if kind == slot)

    def instances(self, slot: str) -> list[Any]:
        """The plugins of `slot` that can be created without options, by name."""
        plugins = []
        for entry in [self.entries[slot, name] for name in self.names(slot)]:
            try:
                plugins.append(self.make(entry.cls, entry.cls.Options()))
            except ValidationError:
                continue  # it has required options: only a job that names it can use it
            except Exception as error:  # a third party's code
                why = f"making it raised {type(error).__name__}: {error}"
                self.faults.append(Fault(entry.source, "broken", why))
        return plugins

    def make(self, cls: Any, options: Any, held: Mapping[str, Mapping[str, Any]] | None = None) -> Any:
        """A plugin with its options and the plugins that they choose and hold. Raises UsageError for an unknown plugin."""
        classes = {option: self.find(slot, getattr(options, option)).cls for option, slot in cls.chooses.items()}
        chosen = {option: self.make(inner, inner.Options()) for option, inner in classes.items()}
        # most constructors take options alone
        return cls(options, **({"chosen": chosen} if cls.chooses else {}), **({"held": held} if cls.holds else {}))

    def find(self, slot: str, name: str) -> Registered:
        """The plugin. Raises UsageError for an unknown name, EnvironmentUnfitError for an unusable plugin."""
        self.load([source for source in self.waiting if source.entry_point == f"{slot}.{name}"])
        if (slot, name) not in self.entries:
            self.complete()  # a module may have more plugins than its entry point names
        entry = self.entries.get((slot, name))
        if entry is not None:
            self.used.add((slot, name))
            return entry
        for fault in self.faults:
            if fault.is_about(slot, name):
                raise EnvironmentUnfitError(f"{slot} plugin {name!r} is {fault.state}: {fault.source}: {fault.why}")
        near = difflib.get_close_matches(name, self.names(slot), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        of_hub = _HUB if slot in ("model", "dataset") and not near else ""
        installed = ", ".join(self.names(slot)) or "none"
        raise UsageError(f"no installed plugin provides the {slot} {name!r}{hint} (installed: {installed}){of_hub}")

    def _collect(self, slot: Slot, sources: Sequence[ModuleSource], function: Callable[[], Any]) -> list[Registered]:
        """Call one registration hook of one module, so that a failure affects this module alone. Returns its usable plugins.

        sources: the module's entry points.
        """
        module = sources[0]
        try:
            classes = function()
        except Exception as error:  # a third party's code: its failure becomes a fault, not a traceback
            self.faults.append(Fault(module, "broken", f"hook {slot.hook} raised {type(error).__name__}: {error}"))
            return []
        if not isinstance(classes, (list, tuple)):
            why = f"hook {slot.hook}: expected a list of {slot.contract.__name__} classes, found {classes!r}"
            self.faults.append(Fault(module, "broken", why))
            return []
        usable = []
        for cls in classes:
            fault = _class_fault(slot, cls)
            name = getattr(cls, "name", None)
            source = next((source for source in sources if source.entry_point == f"{slot.name}.{name}"), module)
            if fault is None:
                usable.append(Registered(cls, source))
            else:
                key = (slot.name, name) if isinstance(name, str) else None
                self.faults.append(Fault(source, "broken", fault, key))
        return usable

    def _settle(self, key: tuple[str, str]) -> None:
        """Decide which plugin gets the name `key`: another distribution's rather than hpctrain's, so that people can replace it."""
        others = [plugin for plugin in self.claims[key] if plugin.source.distribution != OWN] or self.claims[key]
        if len(others) > 1:
            names = " and ".join(str(plugin.source) for plugin in others)
            for source in (plugin.source for plugin in others):
                why = f'the name is claimed by {names}; leave the other out with [plugins] block = ["{source.module}"]'
                fault = Fault(source, "broken", f"{why}, or uninstall it", key)
                self.faults += [] if fault in self.faults else [fault]  # hpctrain's own may have come later
            return
        (chosen,) = others
        self.entries[key] = chosen
        unused = [str(plugin.source) for plugin in self.claims[key] if plugin is not chosen]
        broken = [fault for fault in self.faults if fault.state == "broken" and fault.is_about(*key)]
        what = f"it provides the {key[0]} {key[1]!r}"
        if broken and chosen.source.distribution == OWN:
            self.remarks[key] = f"{what}, since {broken[0].source} is broken: {broken[0].why}"
        if unused:
            how = f'[plugins] block = ["{chosen.source.distribution or chosen.source.module}"] takes the other'
            self.remarks[key] = f"{what}, and {' and '.join(unused)} is not used; {how}"


def build_registry(modules: Sequence[str] = (), block: Sequence[str] = (), complete: bool = True) -> Registry:
    """The plugins of all modules; if not `complete`, those named by entry points are imported when they are asked for. Raises
    EnvironmentUnfitError for a broken module of `modules`, which the job asks for."""
    sources, faults = sources_of(modules, block)
    registry = Registry(new_manager(), sources, faults=faults)
    registry.load([source for source in sources if complete or not _waits(source)])
    for fault in registry.faults:
        if fault.state == "broken" and fault.source.module in modules:
            raise EnvironmentUnfitError(f"[plugins] load: {fault.source}: {fault.why}")
    return registry


def _waits(source: ModuleSource) -> bool:
    """Whether a module may wait until a job names its plugin."""
    # another distribution's hooks may be functions, which every job calls
    slot = source.entry_point.partition(".")[0]
    return slot in SLOTS and (slot != "hook" or source.distribution == OWN)


def _class_fault(slot: Slot, cls: object) -> str | None:
    """The reason why `cls` cannot be a plugin of `slot`."""
    expected = f"hook {slot.hook}: expected subclasses of {slot.contract.__name__}"
    if not isinstance(cls, type) or not issubclass(cls, slot.contract):
        return f"{expected}, found {cls!r}"
    if not isinstance(getattr(cls, "name", None), str) or not cls.name:
        return f"{expected} with a `name`, and {cls.__qualname__} has none"
    what, missing = f"{expected}, and {cls.__qualname__} ({cls.name})", sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        return f"{what} lacks {', '.join(missing)}"
    unfit = _unfit_method(cls)
    if unfit:
        return f"{what}: {unfit}"
    reserved = sorted({} if slot.inner else table_class(slot).model_fields.keys() & cls.Options.model_fields.keys())
    if reserved:  # the core reads these first: the plugin would never see them
        return f"{what} has the options {', '.join(reserved)}, which are keys of the core's"
    return None


def _unfit_method(cls: type) -> str:
    """A clause about a method of `cls` that can't be called as its contract's is; "" if all can."""
    contracts = [base for base in cls.__mro__ if base.__module__.startswith("hpctrain.contracts.")]
    for name, method in ((name, method) for base in contracts for name, method in vars(base).items()):
        own = inspect.getattr_static(cls, name)  # as it is in the class: not bound, no property's value
        if own is method or name == "__init__" or not (inspect.isfunction(own) and inspect.isfunction(method)):
            continue
        arguments = list(inspect.signature(method).parameters)
        try:
            inspect.signature(own, follow_wrapped=False).bind(*arguments)  # a wrapper is what is called
        except TypeError:
            taken = ", ".join([*inspect.signature(own).parameters][1:])
            return f"`{name}` is called with ({', '.join(arguments[1:])}), and takes ({taken})"
    return ""
