"""hpctrain schema: prints a JSON Schema of the job file for editors."""

from __future__ import annotations

import json

import click

from hpctrain.cli.options import example


@click.command("schema", epilog=example("hpctrain schema > schema.json"))
def command() -> None:
    """Print a JSON Schema of the job file, with the options of every installed plugin."""
    from hpctrain.checking.schema import job_schema
    from hpctrain.plugins.registry import build_registry

    click.echo(json.dumps(job_schema(build_registry()), indent=2))
