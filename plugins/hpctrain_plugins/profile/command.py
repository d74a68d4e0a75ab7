"""hpctrain profile: records steps of a running job, and makes tables, one trace and analyses of what was recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from hpctrain.toolkit.commands import UsageError, example, hookimpl

_SHOW = "show"


class _Profile(click.Group):
    """A group whose command `show` needs no name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [_SHOW, *args]
        return super().parse_args(ctx, args)


@click.group(
    "profile", cls=_Profile,
    epilog=example("hpctrain profile runs/gpt --now --record 3", "hpctrain profile merge runs/gpt", "hpctrain profile report runs/gpt"),
)  # fmt: skip
def command() -> None:
    """Record steps of a running job, and show what its ranks did.

    `hpctrain profile RUN_DIR` is short for `hpctrain profile show RUN_DIR`.
    """


_run = click.argument("run", metavar="RUN_DIR", type=click.Path(path_type=Path))
_window = click.option("--window", metavar="NAME", help="A window in RUN_DIR/profile (default: the newest one).")


def _ranks(_: click.Context, __: click.Parameter, text: str | None) -> list[int] | None:
    if text is None or text == "all":
        return None
    try:
        return [int(one) for one in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"found {text!r}, expected numbers such as 0,3, or all") from None


@command.command(_SHOW, epilog=example("hpctrain profile runs/gpt", "hpctrain profile runs/gpt --now --ranks 0,1 --memory"))
@_run
@_window
@click.option("--ranks", metavar="LIST", callback=_ranks, help='Only these ranks, such as 0,3 (default: all).')
@click.option("--top", default=10, show_default=True, type=click.IntRange(min=1), help="Rows of a table.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object with every operator of each rank, in place of tables.")
@click.option("--now", is_flag=True, help="First ask the job that runs in RUN_DIR to record its next steps.")
@click.option("--record", default=3, show_default=True, type=click.IntRange(min=1), help="With --now: steps to record.")
@click.option("--warmup", default=1, show_default=True, type=click.IntRange(min=0), help="With --now: steps before them in which the "
              "profiler runs and keeps nothing.")  # fmt: skip
@click.option("--shapes", is_flag=True, help="With --now: the shapes of inputs.")
@click.option("--memory", is_flag=True, help="With --now: memory by operator.")
@click.option("--stacks", is_flag=True, help="With --now: Python's functions.")
@click.option("--snapshot", is_flag=True, help="With --now: a snapshot of an accelerator's memory.")
@click.option("--timeout", default=60.0, show_default=True, type=click.FloatRange(min=0, min_open=True), help="With --now: seconds "
              "for the job to begin.")  # fmt: skip
@click.option("--wait", default=600.0, show_default=True, type=click.FloatRange(min=0, min_open=True), help="With --now: seconds for "
              "the traces after that.")  # fmt: skip
def show(
    run: Path, window: str | None, ranks: list[int] | None, top: int, as_json: bool, now: bool, timeout: float, wait: float, **asked: Any
) -> int:
    """Print the operators that took most time and memory in a window, of all ranks together.

    With --now, a job that runs records its next steps first; this works in every job, also on any machine that sees RUN_DIR.
    """
    from hpctrain_plugins.profile.asking import record_now
    from hpctrain_plugins.profile.table import Figures
    from hpctrain_plugins.profile.traces import stored_window

    _refuse_no_run(run)
    code = 0
    if now:
        values = {name: value for name, value in asked.items() if value} | {"warmup": asked["warmup"], "ranks": ranks or "all"}
        window, code = record_now(run, values, timeout, wait)
    stored = stored_window(run, window)
    figures = Figures(stored, ranks or [])
    if as_json:
        click.echo(json.dumps(figures.as_dict()))
    else:
        click.echo(str(stored))
        click.echo("\n".join(figures.lines(top)))
    return code


@command.command("merge", epilog=example("hpctrain profile merge runs/gpt"))
@_run
@_window
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Default: merged.json.gz in the window.")
def merge(run: Path, window: str | None, output: Path | None) -> None:
    """Merge the traces of all ranks into one for ui.perfetto.dev, on the clock of rank 0."""
    from hpctrain_plugins.profile.merging import write_merged
    from hpctrain_plugins.profile.traces import stored_window

    _refuse_no_run(run)
    stored = stored_window(run, window)
    path, count = write_merged(stored, output)
    worst = max((one.error_ns for one in stored.ranks), default=0)
    click.echo(f"{stored}\n{count} events in {path}; the clocks agree within {worst / 1e6:.3f} ms")


@command.command("report", epilog=example("hpctrain profile report runs/gpt"))
@_run
@_window
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def report(run: Path, window: str | None, as_json: bool) -> None:
    """Analyse a window's accelerators with HolisticTraceAnalysis: time by kind, overlap of communication, causes of idle time, the
    critical path."""
    from hpctrain_plugins.profile.hta_report import report_of
    from hpctrain_plugins.profile.traces import stored_window

    _refuse_no_run(run)
    found = report_of(stored_window(run, window))
    click.echo(json.dumps(found) if as_json else "\n".join(found))


def _refuse_no_run(run: Path) -> None:
    if not run.is_dir():
        raise UsageError(f"{run} is no directory; expected the output_dir of a job, such as runs/NAME")


@hookimpl
def hpctrain_command() -> click.Command:
    return command
