"""hpctrain plugins: lists the installed plugins and the options of each, and begins a package with a new one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.groups import OpenGroup
from hpctrain.cli.options import example, say
from hpctrain.toolkit.commands import hookimpl

if TYPE_CHECKING:
    from hpctrain.cli.groups import OfferedCommand
    from hpctrain.contracts.plugin import Plugin
    from hpctrain_tools.listing import Listed


@click.group(
    "plugins",
    invoke_without_command=True,
    epilog=example("hpctrain plugins", "hpctrain plugins new schedule my-schedule"),
)
@click.option("--json", "as_json", is_flag=True, help="One JSON array instead of a table.")
@click.option("--load", multiple=True, metavar="MODULE", help="Load this module, too, as [plugins] load does.")
@click.pass_context
def command(ctx: click.Context, as_json: bool, load: tuple[str, ...]) -> None:
    """List every plugin by slot and every command of a plugin, with distribution, entry point and state."""
    from hpctrain.registry.registry import build_registry
    from hpctrain_tools.listing import list_commands, list_plugins

    ctx.obj = registry = build_registry(load)
    if ctx.invoked_subcommand is not None:
        return
    rows = [*list_plugins(registry), *list_commands(_offers(ctx))]
    if as_json:
        say(json.dumps([row.as_dict() for row in rows], indent=2))
        return
    say(_table(rows))


@command.command("show", epilog=example("hpctrain plugins show optimizer adamw"))
@click.argument("slot")
@click.argument("name")
@click.pass_obj
def show(registry: object, slot: str, name: str) -> None:
    """Describe the plugin NAME of SLOT and its options, with types, defaults, units and help."""
    from hpctrain.base.errors import UsageError
    from hpctrain.registry.entry_points import COMMAND
    from hpctrain.registry.registry import Registry
    from hpctrain.registry.slots import SLOTS
    from hpctrain_tools.listing import describe_options

    assert isinstance(registry, Registry)
    if slot == COMMAND:
        raise UsageError(f"a command describes itself: hpctrain {name} --help")
    if slot not in SLOTS:
        raise UsageError(f"there is no slot {slot!r}; expected one of {', '.join(SLOTS)}")
    entry = registry.find(slot, name)
    cls: type[Plugin] = entry.cls
    say(f"{slot} {name}: {(cls.__doc__ or '').strip()}\nfrom {entry.source}\n")
    for option in describe_options(cls, registry):
        say(f"{option.key} ({option.type}; {option.default})\n    {option.help}")


@command.command("new", epilog=example("hpctrain plugins new schedule my-schedule"))
@click.argument("slot")
@click.argument("name")
@click.option("--to", type=click.Path(path_type=Path), metavar="DIR", help="A new directory. [default: hpctrain-NAME]")
def new(slot: str, name: str, to: Path | None) -> None:
    """Write a package with the plugin NAME of SLOT: class, test, README and workflow. It passes `check_plugin` at once."""
    from hpctrain.base.errors import UsageError
    from hpctrain.registry.slots import SLOTS
    from hpctrain_tools.testing.package import write_package

    if slot not in SLOTS:
        raise UsageError(f"there is no slot {slot!r}; expected one of {', '.join(SLOTS)}")
    directory = to or Path(f"hpctrain-{name}")
    write_package(slot, name, directory)
    say(f"wrote {directory}; then: cd {directory} && pip install -e '.[test]' && pytest")


def _offers(ctx: click.Context) -> list[OfferedCommand]:
    """The commands that plugins add, to any group."""
    from hpctrain.cli.groups import GROUPS

    first = ctx.find_root().command
    assert isinstance(first, OpenGroup)
    groups = [first, *(group for name in GROUPS if isinstance(group := first.get_command(ctx, name), OpenGroup))]
    return [offer for group in groups for offer in group.offers()]


def _table(rows: list[Listed]) -> str:
    """A table with columns as wide as their widest entry; nothing is cut, so that the output can be searched."""
    header = ("SLOT", "NAME", "STATE", "DISTRIBUTION", "ENTRY POINT")
    cells = [header, *((r.slot, r.name, r.state, f"{r.distribution} {r.version}".strip(), r.entry_point) for r in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    reasons = [f"{r.slot or r.entry_point} {r.name}: {r.why}".replace("  ", " ") for r in rows if r.why]
    return "\n".join(lines + (["", *reasons] if reasons else []))


@hookimpl
def hpctrain_command() -> click.Command:
    return command
