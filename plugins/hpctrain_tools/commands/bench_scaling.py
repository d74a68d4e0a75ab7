"""hpctrain bench scaling: measures a job's step on several numbers of ranks."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import click

from hpctrain.base.launcher_variables import launched
from hpctrain.toolkit.commands import EnvironmentUnfitError, UsageError, example, hookimpl, reason, say
from hpctrain_tools.bench.options import job_arguments, words_of

_PICTURES = (".svg", ".png", ".pdf")


@click.command("scaling", epilog=example("hpctrain bench scaling job.toml -n 1,2,4 --plot scaling.svg"))
@job_arguments
@click.option("-n", "ranks", default="1,2", show_default=True, metavar="N,...", help="Numbers of ranks.")
@click.option(
    "--weak", is_flag=True, help="Let the global batch grow with the ranks, from the job's on the smallest number."
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Draw the efficiency, in .svg, .png or .pdf.",
)
def command(
    job: Path, ranks: str, steps: int, overrides: tuple[str, ...], as_json: bool, weak: bool, plot: Path | None
) -> int:  # fmt: skip
    """Measure how a step of JOB.toml gets faster with more ranks: the ideal time to the measured one.

    The ranks of each number start here, one number after the other. In each run hpctrain and a plain PyTorch loop take turns, as
    in `hpctrain bench step`.
    """
    from hpctrain_tools.bench.scaling import as_dict, batches, draw, lines, measure, numbers, places

    counts = numbers(ranks)
    if launched():
        raise UsageError(
            "bench scaling starts ranks of several numbers itself; expected no launcher: use bench step under each"
        )
    _refuse_picture(plot)
    from hpctrain.checking.check import check
    from hpctrain.job.raw import RawJob
    from hpctrain.job.reading import read_job
    from hpctrain_tools.bench.running import refuse
    from hpctrain_tools.bench.tables import with_batch

    raw = read_job(job, overrides)
    check(raw, None)
    of_counts = batches(raw.tables, counts, weak)
    for count, (key, size) in zip(counts, of_counts, strict=True):
        refuse(RawJob(with_batch(raw.tables, key, size), raw.places, raw.source), count, steps)
    words = words_of(job, steps, overrides)
    found = [measure(words, count, batch) for count, batch in zip(counts, of_counts, strict=True)]
    at = places(found, [size for _, size in of_counts], weak)
    name, measured = found[0]["job"], found[0]["steps"]
    say(json.dumps(as_dict(name, weak, measured, at)) if as_json else "\n".join(lines(name, weak, measured, at)))
    if plot is not None:
        try:
            draw(name, weak, at, plot)
        except OSError as error:
            raise UsageError(f"--plot {plot} can't be written: {reason(error)}") from None
    return 0


def _refuse_picture(plot: Path | None) -> None:
    """Raises before anything is measured."""
    if plot is None:
        return
    if plot.suffix not in _PICTURES:
        raise UsageError(f"--plot {plot}: expected a name that ends in {', '.join(_PICTURES)}")
    if not plot.parent.is_dir():
        raise UsageError(f"--plot {plot}: there is no directory {plot.parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise EnvironmentUnfitError(
            "--plot needs matplotlib: pip install 'hpctrain[plots]'; without --plot the table has bars"
        )


@hookimpl
def hpctrain_command() -> click.Command:
    return command
