"""hpctrain report: a page about a run, or about several, with a verdict."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click

from hpctrain.base.safe_files import replacing
from hpctrain.toolkit.commands import EnvironmentUnfitError, UsageError, example, hookimpl, reason, say

_FORMATS = ("html", "markdown", "json")


@click.command(
    "report", epilog=example("hpctrain report runs/gpt", "hpctrain report runs/a runs/b -o both.html",
                             "hpctrain report runs/gpt --format markdown", "hpctrain report runs/gpt --plan plan.json"),
)  # fmt: skip
@click.argument("runs", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--format", "kind", type=click.Choice(_FORMATS), help="Default: html, and markdown without matplotlib.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE",
    help="Default: of HTML, report.html in RUN_DIR, or here for several runs; else the terminal.",
)  # fmt: skip
@click.option(
    "--plan", type=click.Path(path_type=Path), metavar="FILE",
    help="Compare the memory with a plan, as `hpctrain plan JOB.toml -n RANKS --json > FILE` writes it.",
)  # fmt: skip
def command(runs: tuple[Path, ...], kind: str | None, output: Path | None, plan: Path | None) -> None:
    """Write a report of a run: how it ended, what limited it, what to try next, and all that its files tell.

    Works on any machine that sees RUN_DIR, while the run goes on and afterwards. Several runs are compared.
    """
    from hpctrain_tools.report.gathering import gather
    from hpctrain_tools.report.pages import FILE_NAME, text_of
    from hpctrain_tools.report.plan_file import read_plan
    from hpctrain_tools.report.plots import refuse_without_matplotlib

    for run in runs:
        _refuse_no_run(run)
    if kind is None and output is None and find_spec("matplotlib") is None:
        say("markdown, since a page with plots needs matplotlib: pip install 'hpctrain[plots]'", err=True)
        kind = "markdown"
    kind = kind or "html"
    if kind == "html":
        refuse_without_matplotlib()
        output = output or (runs[0] / FILE_NAME if len(runs) == 1 else Path(FILE_NAME))
    planned = None if plan is None else read_plan(plan)
    text = text_of([gather(run, plan=planned) for run in runs], kind)
    if output is None:
        say(text, nl=False)
        return
    try:
        with replacing(output) as file:
            file.write(text.encode(errors="replace"))
    except OSError as error:
        raise EnvironmentUnfitError(f"{output} cannot be written: {reason(error)}; -o FILE names another one") from None
    say(f"{output}")


def _refuse_no_run(run: Path) -> None:
    from hpctrain_tools.runs import RunDirectory

    if not run.is_dir():
        raise UsageError(f"{run} is no directory; expected the output_dir of a job, such as runs/NAME")
    if not RunDirectory(run).is_run():
        raise UsageError(
            f"{run} has no job.resolved.toml; expected the output_dir of a job: `hpctrain runs` lists them"
        )


@hookimpl
def hpctrain_command() -> click.Command:
    return command
