"""hpctrain prove: a job of one's own on several layouts, against one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.options import set_option
from hpctrain.toolkit.commands import example, hookimpl, say

if TYPE_CHECKING:
    from hpctrain_tools.testing.prove import Proof
    from hpctrain_tools.testing.record import Distances

_DIFFERS = 5


@click.command(
    "prove",
    epilog=example(
        "hpctrain prove job.toml", 'hpctrain prove job.toml --layout "4 parallelism.tensor=2 sharding.stage=3"'
    ),
)
@click.argument("job", metavar="JOB.toml", type=click.Path(path_type=Path))
@set_option
@click.option("--layout", "layouts", multiple=True, metavar="'RANKS TABLE.KEY=VALUE...'", help="A layout to try, in place of "
              "2 and 3 ranks with ZeRO stages; may be repeated.")  # fmt: skip
@click.option(
    "--limit", default=600.0, show_default=True, type=click.FloatRange(min=1), help="Seconds that a run may take."
)
@click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")
def command(job: Path, overrides: tuple[str, ...], layouts: tuple[str, ...], limit: float, as_json: bool) -> int:
    """Train a job on one process and on other layouts, and compare.

    Eight steps: losses, gradients, parameters, evaluations; also resumed in the middle. What a change of the last bit makes is
    measured beside. Exit code 5 if something differs.
    """
    from hpctrain.job.reading import read_job
    from hpctrain_tools.testing.prove import parse_layout, prove, usual_layouts

    raw = read_job(job, overrides)
    proof = prove(raw, [parse_layout(text) for text in layouts] or usual_layouts(raw), limit)
    if as_json:
        noise = proof.noise.__dict__
        say(
            json.dumps(
                {"holds": proof.holds, "noise": noise, "layouts": [row.as_dict() for row in proof.rows]}, indent=2
            )
        )
    else:
        say(_table(proof))
    return 0 if proof.holds else _DIFFERS


def _table(proof: Proof) -> str:
    """Rows of text; what differs stands below its row."""
    lines = ["     loss      norm   weights  layout", f"{_numbers(proof.noise)}  one process, changed by the last bit"]
    for row in proof.rows:
        lines.append(f"{_numbers(row.distances)}  {row.layout}: {row.state}")
        lines += [f"    {text}" for text in (row.first, row.hint and f"it may be {row.hint}") if text]
    lines.append(
        "each layout trains as one process does" if proof.holds else "not every layout trains as one process does"
    )
    return "\n".join(lines)


def _numbers(far: Distances | None) -> str:
    return (
        " ".join(["        -"] * 3)
        if far is None
        else f"{far.loss:9.1e} {far.gradient_norm:9.1e} {far.parameters:9.1e}"
    )


@hookimpl
def hpctrain_command() -> click.Command:
    """The command."""
    return command
