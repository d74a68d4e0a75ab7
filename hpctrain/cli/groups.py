"""Groups of commands to which plugins may add their own: "command.NAME", or "command.GROUP.NAME" in one of hpctrain's own groups. A
command's module is imported when the command is used, and when the help describes it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import import_module

import click

from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.registry.entry_points import RAISED, ModuleSource, entry_points, usable_module
from hpctrain.registry.hookspecs import PROJECT

GROUPS = ("bench", "checkpoint")
"""hpctrain's own commands that take commands of plugins."""
_HOOK = f"{PROJECT}_command"
_LONGEST_LINE = 1000  # characters of a description in the help, which wraps lines: click would cut descriptions at 45


@dataclass(frozen=True)
class OfferedCommand:
    """A plugin's command. name: in its group. why: the reason why it can't be used, if that is known without its module."""

    name: str
    source: ModuleSource
    why: str = ""

    def load(self) -> click.Command:
        """Import it. Raises EnvironmentUnfitError with the reason why it cannot be used."""
        command = self.why or _command_of(self.source)
        if isinstance(command, str):
            raise EnvironmentUnfitError(f"the command {self.source.command!r} is broken: {self.source}: {command}")
        return command


def offers(group: str, own: Collection[str]) -> list[OfferedCommand]:
    """Commands that plugins add to a group, "" for the first level, by name. own: the names of the core's commands there."""
    by_name: dict[str, list[ModuleSource]] = {}
    for source in sorted(entry_points(), key=lambda entry: (entry.distribution != PROJECT, entry.distribution)):
        if source.command is not None:
            place, _, name = source.command.rpartition(" ")
            if place not in ("", *GROUPS):
                place, name = "", source.command  # the first level says that there is no such group
            if place == group:
                by_name.setdefault(name, []).append(source)
    return [
        OfferedCommand(name, source, _hindrance(name, source, sources, own))
        for name, sources in sorted(by_name.items())
        for source in sources
    ]


def _hindrance(name: str, source: ModuleSource, sources: Sequence[ModuleSource], own: Collection[str]) -> str:
    if " " in name or not name:
        return f'its entry point names no group; expected "command.NAME", or "command.GROUP.NAME" with {" or ".join(GROUPS)}'
    if source.distribution == PROJECT:
        return ""  # plugins get out of its way
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
        command = hook()
    except RAISED as error:  # a third party's code must not break the help of all commands
        return f"hook {_HOOK} raised {type(error).__name__}: {error}"
    return (
        command if isinstance(command, click.Command) else f"hook {_HOOK}: expected a click.Command, found {command!r}"
    )


class OpenGroup(click.Group):
    """hpctrain's own commands, which keep their names, and those of plugins. A plugin's command is imported on use only."""

    @property
    def place(self) -> str:
        """The group's name in entry points."""
        return self.name or ""

    def sections(self, names: list[str]) -> dict[str, list[str]]:
        """The names of first-party commands under the titles of the help."""
        return {"Commands": names}

    def offers(self) -> list[OfferedCommand]:
        """Commands that plugins add."""
        return offers(self.place, self.commands)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(dict.fromkeys([*super().list_commands(ctx), *(offer.name for offer in self.offers())]))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command. Raises EnvironmentUnfitError for a plugin's that cannot be used."""
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        offer = next((offer for offer in self.offers() if offer.name == cmd_name), None)
        return None if offer is None else offer.load()

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own = {name: command.get_short_help_str(_LONGEST_LINE) for name, command in sorted(self.commands.items())}
        others = []
        for offer in self.offers():
            if offer.source.distribution == PROJECT:
                own[offer.name] = _describe(offer)
            else:
                others.append((offer.name, _describe(offer)))
        sections = {title: [(name, own[name]) for name in names] for title, names in self.sections([*own]).items()}
        sections["Of plugins"] = others
        indent = max(len(name) for rows in sections.values() for name, _ in rows)  # one column in all sections
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl([(name.ljust(indent), text) for name, text in rows])


def _describe(offer: OfferedCommand) -> str:
    try:
        return offer.load().get_short_help_str(_LONGEST_LINE)
    except EnvironmentUnfitError as error:  # the help shows it, and the other commands
        return str(error)
