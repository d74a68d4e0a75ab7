"""Groups of commands to which plugins may add their own."""

from __future__ import annotations

import click

from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.plugins.entry_points import OfferedCommand, offers

# characters of a command's description in the help, which wraps them: no description is cut
_LONGEST_LINE = 1000


class OpenGroup(click.Group):
    """hpctrain's own commands, which keep their names, and those of plugins. A plugin's is imported on use only."""

    @property
    def place(self) -> str:
        """The group's name in entry points."""
        return self.name or ""

    def own(self, ctx: click.Context) -> list[str]:
        """The names of hpctrain's own commands."""
        return super().list_commands(ctx)

    def sections(self, names: list[str]) -> dict[str, list[str]]:
        """The names of first-party commands under the titles of the help."""
        return {"Commands": names}

    def own_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """A command of hpctrain's own."""
        return super().get_command(ctx, name)

    def offers(self, ctx: click.Context) -> list[OfferedCommand]:
        """Commands that plugins add."""
        return offers(self.place, self.own(ctx))

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(dict.fromkeys([*self.own(ctx), *(offer.name for offer in self.offers(ctx))]))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command. Raises EnvironmentUnfitError for a plugin's that cannot be used."""
        own = self.own_command(ctx, cmd_name)
        if own is not None:
            return own
        offer = next((one for one in self.offers(ctx) if one.name == cmd_name), None)
        return None if offer is None else offer.load()

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own = {name: self._describe(ctx, name) for name in self.own(ctx)}
        others = []
        for offer in self.offers(ctx):
            if offer.is_first_party:
                own[offer.name] = _describe_offer(offer)
            else:
                others.append((offer.name, _describe_offer(offer)))
        sections = {title: [(name, own[name]) for name in names] for title, names in self.sections([*own]).items()}
        sections["Of plugins"] = others
        indent = max(len(name) for rows in sections.values() for name, _ in rows)
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl([(name.ljust(indent), text) for name, text in rows])

    def _describe(self, ctx: click.Context, name: str) -> str:
        command = self.own_command(ctx, name)
        return "" if command is None else command.get_short_help_str(_LONGEST_LINE)


def _describe_offer(offer: OfferedCommand) -> str:
    try:
        return offer.load().get_short_help_str(_LONGEST_LINE)
    except EnvironmentUnfitError as error:
        return str(error)
