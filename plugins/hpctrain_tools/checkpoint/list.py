"""hpctrain checkpoint list: the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from hpctrain.base.errors import CheckpointError, UsageError, reason
from hpctrain.cli.options import example, say
from hpctrain_tools.checkpoint.common import PATH, Formats, files_of, sizes_of_files, table
from hpctrain_tools.options import size_text


@click.command("list", epilog=example("hpctrain checkpoint list runs/gpt"))
@click.argument("run", metavar="RUN", type=PATH)
@click.pass_obj
def list_checkpoints(formats: Formats, run: Path) -> None:
    """List the checkpoints of RUN (its output_dir) in the order in which a resume tries them.

    Their contents are not checked: use `verify`.
    """
    from hpctrain.checkpoint.directory import behind_name
    from hpctrain.checkpoint.finding import root_of

    with files_of(run):
        if not run.exists():
            raise UsageError(f"there is no run {run}; expected its output_dir, such as runs/NAME")
        directory = root_of(run)
        if directory is None:
            raise UsageError(f"{run} has no checkpoints; expected a run's output_dir, such as runs/NAME")
        rows, best = [], behind_name(directory.root / "best")
        for path in directory.candidates():
            with suppress(FileNotFoundError):  # a running job has just deleted it
                row = _row(formats, path, path.name == best.name)
                path.stat()
                rows.append(row)
    say(table(("CHECKPOINT", "FORMAT", "SIZE", "FILES", "SAVED", "EVALUATION", "NOTE"), rows))


def _row(formats: Formats, path: Path, is_best: bool) -> tuple[str, ...]:
    from hpctrain.checkpoint.finding import recognize

    saved = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M:%S")
    name = size = count = evaluation = "-"
    note = "best" if is_best else ""
    try:
        format = recognize(path, formats.all)
        if format is None:
            return str(path), name, size, count, saved, evaluation, "unknown format"
        name, files = format.name, sizes_of_files(path)
        size, count = size_text(sum(files.values())), str(len(files))
        evaluation = _evaluation(format.read_values(path))
    except CheckpointError as error:
        note = f"damaged: {error}"
    except OSError as error:
        note = f"unreadable: {reason(error)}"
    return str(path), name, size, count, saved, evaluation, note


def _evaluation(values: Mapping[str, Any]) -> str:
    """ "loss 1.0972  accuracy 0.4667", or "-" for a step that was not evaluated."""
    from hpctrain.checkpoint.retention import EVALUATION_LOSS, EVALUATION_METRICS

    others = values.get(EVALUATION_METRICS)
    found = {"loss": values.get(EVALUATION_LOSS), **(others if isinstance(others, dict) else {})}
    told = [f"{name} {value:.4f}" for name, value in found.items() if isinstance(value, float)]
    return "  ".join(told) or "-"
