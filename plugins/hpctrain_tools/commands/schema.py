"""hpctrain schema: prints a JSON Schema of the job file for editors."""

from __future__ import annotations

import json

import click

from hpctrain.cli.options import example, say
from hpctrain.toolkit.commands import hookimpl


@click.command("schema", epilog=example("hpctrain schema > schema.json"))
def command() -> None:
    """Print a JSON Schema of the job file: the keys of hpctrain itself, with the options of plugins as free ones."""
    from hpctrain.job.tables import Job

    schema = Job.model_json_schema()
    of_one = {"type": "string"}
    files = {
        "anyOf": [of_one, {"type": "array", "items": of_one}],
        "description": "Job files that this one is merged over.",
    }
    schema["properties"]["extends"] = files
    del schema["required"]  # a file that extends another may lack any table
    say(json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2))


@hookimpl
def hpctrain_command() -> click.Command:
    return command
