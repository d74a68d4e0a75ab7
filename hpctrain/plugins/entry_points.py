"""Plugin modules by their entry points, of the group `hpctrain`, and their import; and the commands among them, "command.NAME", or
"command.GROUP.NAME" in one of hpctrain's own groups. Without torch and pydantic, for the help: a command's module is imported when
the command is used, and when the help describes it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import click

from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.plugins.hookspecs import PROJECT

COMMAND = "command"
"""The begin of the name of a command's entry point, "command.NAME"."""
GROUPS = ("bench", "checkpoint")
"""hpctrain's own commands that take commands of plugins."""
_HOOK = f"{PROJECT}_command"
RAISED = (Exception, SystemExit)
"""Exceptions of a module of somebody else's that must not end the command which imports it."""


@dataclass(frozen=True)
class ModuleSource:
    """The origin of a plugin module."""

    module: str
    distribution: str = ""
    version: str = ""
    entry_point: str = ""
    """The entry point's name; by convention "slot.name", so that a broken module still shows what it would provide."""

    @property
    def command(self) -> str | None:
        """The command that the module provides, such as "bench mine" for "command.bench.mine"; None for other modules."""
        kind, _, path = self.entry_point.partition(".")
        return path.replace(".", " ") if kind == COMMAND and self.distribution else None

    @property
    def slot(self) -> str:
        """The begin of the entry point's name."""
        return self.entry_point.partition(".")[0]

    @property
    def key(self) -> str:
        """The module's name in pluggy."""
        return f"{self.distribution}:{self.entry_point}" if self.distribution else self.module

    @property
    def names(self) -> set[str]:
        """The module's names in [plugins] block."""
        return {name for name in (self.entry_point, self.module, self.distribution) if name}

    def __str__(self) -> str:
        if not self.distribution:
            return f"{self.module} ([plugins] load)"
        return f"{self.module} ({self.distribution} {self.version}, entry point {self.entry_point!r})"


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


def usable_module(source: ModuleSource, load: Callable[[str], ModuleType]) -> ModuleType | str:
    """The module, from `load`; a sentence if it cannot be imported."""
    try:
        return load(source.module)
    except ImportError as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and missing != source.module and not source.module.startswith(f"{missing}."):
            return f"it needs the package {missing!r}, which is not installed ({error})"
        return f"the module cannot be imported: {error}"
    except RAISED as error:
        return f"importing it raised {type(error).__name__}: {error}"


@dataclass(frozen=True)
class OfferedCommand:
    """A command of a plugin's. name: in its group. why: why it cannot be used, if that is known without its module."""

    name: str
    source: ModuleSource
    why: str = ""

    @property
    def is_first_party(self) -> bool:
        """Whether it is a tool of hpctrain's own distribution."""
        return self.source.distribution == PROJECT

    def load(self) -> click.Command:
        """Import it. Raises EnvironmentUnfitError with the reason why it cannot be used."""
        found = self.why or _command_of(self.source)
        if isinstance(found, str):
            raise EnvironmentUnfitError(f"the command {self.source.command!r} is broken: {self.source}: {found}")
        return found


def offers(group: str, own: Collection[str]) -> list[OfferedCommand]:
    """Commands that plugins add to a group, "" for the first level, by name. own: the names of the core's commands there."""
    found: dict[str, list[ModuleSource]] = {}
    for source in sorted(entry_points(), key=lambda one: (one.distribution != PROJECT, one.distribution)):
        if source.command is not None:
            place, _, name = source.command.rpartition(" ")
            if place not in ("", *GROUPS):
                place, name = "", source.command  # told at the first level
            if place == group:
                found.setdefault(name, []).append(source)
    return [
        OfferedCommand(name, source, _hindrance(name, source, sources, own))
        for name, sources in sorted(found.items())
        for source in sources
    ]


def _hindrance(name: str, source: ModuleSource, sources: Sequence[ModuleSource], own: Collection[str]) -> str:
    if " " in name or not name:
        return f'its entry point names no group; expected "command.NAME", or "command.GROUP.NAME" with {" or ".join(GROUPS)}'
    if source.distribution == PROJECT:
        return ""
    if name in own or sources[0].distribution == PROJECT:
        return "the name is that of a command of hpctrain's own, which is used; expected another name"
    if len(sources) > 1:
        return f"the name is claimed by {' and by '.join(map(str, sources))}; uninstall one of them"
    return ""


def _command_of(source: ModuleSource) -> click.Command | str:
    """The command of a module; a sentence if it has none that can be used."""
    module = usable_module(source, import_module)
    if isinstance(module, str):
        return module
    hook = getattr(module, _HOOK, None)
    if hook is None or not hasattr(hook, f"{PROJECT}_impl"):
        return f"it implements no hook {_HOOK}: expected a function of this name, marked with hpctrain.toolkit.commands.hookimpl"
    try:
        made = hook()
    except RAISED as error:  # a third party's code
        return f"hook {_HOOK} raised {type(error).__name__}: {error}"
    return made if isinstance(made, click.Command) else f"hook {_HOOK}: expected a click.Command, found {made!r}"
