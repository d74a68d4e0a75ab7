"""hpctrain profile: records steps of a running job; makes tables, one trace and analyses of what was recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from hpctrain.toolkit.commands import UsageError, example, hookimpl, say

_SHOW = "show"
_OF_REQUEST = ("record", "warmup", "shapes", "memory", "stacks", "snapshot", "timeout", "wait")
_SECONDS = click.FloatRange(min=0, min_open=True)


class _Profile(click.Group):
    """A group whose command `show` needs no name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [_SHOW, *args]
        return super().parse_args(ctx, args)


@click.group(
    "profile", cls=_Profile,
    epilog=example("hpctrain profile runs/gpt --now", "hpctrain profile merge runs/gpt", "hpctrain profile report runs/gpt"),
)  # fmt: skip
def command() -> None:
    """Record steps of a running job, and show what ranks did.

    `hpctrain profile RUN_DIR` is short for `hpctrain profile show RUN_DIR`.
    """


def _of_window(function: Callable[..., Any]) -> Callable[..., Any]:
    """RUN_DIR and --window."""
    window = click.option("--window", metavar="NAME", help="A window in RUN_DIR/profile (default: the newest one).")
    return click.argument("run", metavar="RUN_DIR", type=click.Path(path_type=Path))(window(function))


def _of_request(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that go with --now."""
    for decorate in reversed(
        (
            click.option("--now", is_flag=True, help="First ask the job that runs in RUN_DIR to record its next steps. With:"),
            click.option("--record", default=3, show_default=True, type=click.IntRange(min=1), help="Steps to record."),
            click.option("--warmup", default=1, show_default=True, type=click.IntRange(min=0), help="Steps before them, "
                         "in which the profiler runs and keeps nothing."),
            click.option("--shapes", is_flag=True, help="Record the shapes of inputs."),
            click.option("--memory", is_flag=True, help="Record memory by operator."),
            click.option("--stacks", is_flag=True, help="Record Python's functions."),
            click.option("--snapshot", is_flag=True, help="Take a snapshot of an accelerator's memory."),
            click.option("--timeout", default=60.0, show_default=True, type=_SECONDS, help="Seconds for the job to begin."),
            click.option("--wait", default=600.0, show_default=True, type=_SECONDS, help="Seconds for the traces then."),
        )
    ):  # fmt: skip
        function = decorate(function)
    return function


def _ranks(_: click.Context, __: click.Parameter, text: str | None) -> list[int] | None:
    """Rank numbers, which are empty for all; None where they are not given."""
    if text is None:
        return None
    try:
        return [] if text == "all" else sorted({int(one) for one in text.split(",")})
    except ValueError:
        raise click.BadParameter(f"found {text!r}, expected numbers such as 0,3, or all") from None


@command.command(_SHOW, epilog=example("hpctrain profile runs/gpt", "hpctrain profile runs/gpt --now --ranks 0,1"))
@_of_window
@click.option(
    "--ranks", metavar="LIST", callback=_ranks,
    help="These ranks, such as 0,3, or all (default: all; with --now those of the job's [profile]).",
)  # fmt: skip
@click.option("--top", default=10, show_default=True, type=click.IntRange(min=1), help="Rows of a table.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="One JSON object: every operator and all communication of each rank, and of all.",
)
@_of_request
def show(
    run: Path, window: str | None, ranks: list[int] | None, top: int, as_json: bool, now: bool, timeout: float, wait: float,
    **asked: Any,
) -> int:  # fmt: skip
    """Print the operators that took most time and memory in a window, and what accelerators communicated, over the ranks
    together.

    With --now, the job that runs in RUN_DIR first records its next steps. That works in every job, and on any machine that
    sees RUN_DIR.
    """
    from hpctrain_tools.profile.asking import record_now
    from hpctrain_tools.profile.table import Figures
    from hpctrain_tools.profile.traces import refuse_empty, stored_window

    _refuse_no_run(run)
    if not now:
        _refuse_request()
    code = 0
    if now:
        flags = {name: True for name, is_given in asked.items() if is_given is True}  # else as the job has them
        chosen = {} if ranks is None else {"ranks": ranks or "all"}
        values = {"record": asked["record"], "warmup": asked["warmup"], **chosen, **flags}
        window, code = record_now(run, values, timeout, wait)
    stored = stored_window(run, window)
    if code and not stored.ranks:
        return code  # each rank's reason has been told
    refuse_empty(stored)
    figures = Figures(stored, ranks or [])
    if as_json:
        say(json.dumps(figures.as_dict()))
    else:
        say("\n".join([str(stored), *figures.lines(top)]))
    return code


@command.command("merge", epilog=example("hpctrain profile merge runs/gpt"))
@_of_window
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Default: merged.json.gz beside the traces."
)
def merge(run: Path, window: str | None, output: Path | None) -> None:
    """Merge the traces of all ranks into one for ui.perfetto.dev, on the clock of rank 0."""
    from hpctrain_tools.profile.merging import write_merged
    from hpctrain_tools.profile.traces import stored_window

    _refuse_no_run(run)
    stored = stored_window(run, window)
    path, count = write_merged(stored, output)
    worst = max((one.error_ns for one in stored.ranks), default=0)
    say(f"{stored}\n{count} events in {path}; the ranks' clocks agree within {worst / 1e6:.3f} ms")


@command.command("report", epilog=example("hpctrain profile report runs/gpt"))
@_of_window
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def report(run: Path, window: str | None, as_json: bool) -> None:
    """Analyse the accelerators of a window with HolisticTraceAnalysis: time by kind, overlap of communication, causes of idle time,
    the critical path."""
    from hpctrain_tools.profile.hta_report import Report
    from hpctrain_tools.profile.traces import stored_window

    _refuse_no_run(run)
    found = Report(stored_window(run, window))
    say(json.dumps(found.as_dict()) if as_json else "\n".join([str(found.window), *found.lines()]))


def _refuse_request() -> None:
    """Raises for options that say how a running job records."""
    source = click.get_current_context().get_parameter_source
    given = [f"--{name}" for name in _OF_REQUEST if source(name) is ParameterSource.COMMANDLINE]
    if given:
        raise UsageError(
            f"found {', '.join(given)} without --now, which has a running job record; expected both or neither"
        )


def _refuse_no_run(run: Path) -> None:
    if not run.is_dir():
        raise UsageError(f"{run} is no directory; expected the output_dir of a job, such as runs/NAME")


@hookimpl
def hpctrain_command() -> click.Command:
    return command
