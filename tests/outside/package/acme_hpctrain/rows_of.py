"""A command: the number of rows that a run has written."""

from pathlib import Path

import click

from hpctrain.toolkit.commands import UsageError, example, hookimpl


@click.command("acme-rows", epilog=example("hpctrain acme-rows runs/gpt-demo"))
@click.argument("run", type=click.Path(path_type=Path))
def command(run: Path) -> int:
    """Count the rows that a run has written."""
    rows = run / "metrics.jsonl"
    if not rows.exists():
        raise UsageError(f"found no {rows}, expected the directory of a run")
    click.echo(len(rows.read_text().splitlines()))
    return 0


@hookimpl
def hpctrain_command() -> click.Command:
    return command
