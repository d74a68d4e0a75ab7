"""hpctrain prove: a job of one's own on several layouts, against one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.options import set_option
from hpctrain.toolkit.commands import UsageError, example, hookimpl, say

if TYPE_CHECKING:
    from hpctrain_tools.testing.prove import Proof
    from hpctrain_tools.testing.record import Distances

_DIFFERS = 5


@click.command(
    "prove",
    epilog=example(
        "hpctrain prove job.toml",
        'hpctrain prove job.toml --layout "4 parallelism.tensor=2 sharding.stage=3"',
        "hpctrain prove loop.py job.toml",
    ),
)
@click.argument("job", metavar="JOB.toml | PROGRAM.py", type=click.Path(path_type=Path))
@click.argument("words", nargs=-1, metavar="[WORD...]")
@set_option
@click.option("--layout", "layouts", multiple=True, metavar="'RANKS TABLE.KEY=VALUE...'", help="A layout to try, in place of "
              "2 and 3 ranks with ZeRO stages; may be repeated.")  # fmt: skip
@click.option(
    "--limit", default=600.0, show_default=True, type=click.FloatRange(min=1), help="Seconds that a run may take."
)
@click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")
@click.option("--on-top", type=click.Path(path_type=Path), hidden=True, help="Set for the ranks of a program.")
def command(
    job: Path, words: tuple[str, ...], overrides: tuple[str, ...], layouts: tuple[str, ...], limit: float, as_json: bool,
    on_top: Path | None,
) -> int:  # fmt: skip
    """Train a job, or a program with its own loop, on one process and on other layouts, and compare.

    Eight steps: losses, gradients, parameters, evaluations; also resumed in the middle. What a change of the last bit makes is
    measured beside. Exit code 5 if something differs.
    """
    is_program = job.suffix == ".py"
    if is_program and overrides:
        raise UsageError("--set: a program's job is its own; expected none, or --layout for the layouts")
    if words and not is_program:
        raise UsageError(f"found {words[0]!r} behind {job}; expected words for a PROGRAM.py only")
    if on_top is not None:
        from hpctrain_tools.testing.program import run_program

        run_program(on_top, [str(job), *words])
        return 0
    from hpctrain.job.reading import read_job
    from hpctrain_tools.testing.prove import parse_layout, prove, prove_program, usual_layouts

    chosen = [parse_layout(text) for text in layouts]
    if is_program:
        proof = prove_program([str(job), *words], chosen or usual_layouts({}), limit)
    else:
        raw = read_job(job, overrides)
        proof = prove(raw, chosen or usual_layouts(raw.tables), limit)
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
