"""hpctrain checkpoint: lists, shows, verifies and compares checkpoints, and exports and imports weights."""

from __future__ import annotations

import signal
import sys
from types import FrameType

import click

from hpctrain.cli.groups import OpenGroup
from hpctrain.toolkit.commands import hookimpl
from hpctrain_tools.checkpoint.common import Formats
from hpctrain_tools.checkpoint.convert import export, import_weights
from hpctrain_tools.checkpoint.list import list_checkpoints
from hpctrain_tools.checkpoint.show import show
from hpctrain_tools.checkpoint.verify import diff, verify


@click.group("checkpoint", cls=OpenGroup)
@click.option(
    "--load", multiple=True, metavar="MODULE", help="Load this module's formats, too, as [plugins] load does."
)
@click.pass_context
def command(ctx: click.Context, load: tuple[str, ...]) -> None:
    """Look at checkpoints, verify and compare them, export and import weights. Works with every installed format."""
    ctx.obj = Formats(load)
    # like Ctrl-C: removes unfinished files
    before = signal.signal(signal.SIGTERM, _leave)
    ctx.call_on_close(lambda: signal.signal(signal.SIGTERM, before))


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


for one in (list_checkpoints, show, verify, diff, export, import_weights):
    command.add_command(one)


@hookimpl
def hpctrain_command() -> click.Command:
    return command
