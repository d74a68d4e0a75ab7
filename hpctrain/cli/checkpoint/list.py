"""hpctrain checkpoint list: the checkpoints of a run."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from pathlib import Path

import click

from hpctrain.cli.checkpoint.common import PATH, Formats, files_of, size_text, table
from hpctrain.errors import CheckpointError, UsageError, reason


@click.command("list")
@click.argument("run", metavar="RUN", type=PATH)
@click.pass_obj
def list_checkpoints(formats: Formats, run: Path) -> None:
    """List the checkpoints of RUN (its output_dir) in the order in which a resume tries them.

    Their contents are not checked: use `verify`.
    """
    from hpctrain.checkpoint.finding import root_of

    with files_of(run):
        if not run.exists():
            raise UsageError(f"there is no run {run}; expected its output_dir, such as runs/NAME")
        directory = root_of(run)
        if directory is None:
            raise UsageError(f"{run} has no checkpoints; expected a run's output_dir, such as runs/NAME")
        rows = []
        for path in directory.candidates():
            with suppress(FileNotFoundError):  # a running job has just deleted it
                row = _row(formats, path)
                path.stat()
                rows.append(row)
    click.echo(table(("CHECKPOINT", "FORMAT", "SIZE", "FILES", "SAVED", "EVALUATION LOSS", "NOTE"), rows))


def _row(formats: Formats, path: Path) -> tuple[str, ...]:
    from hpctrain.checkpoint.finding import Checkpoint, recognize

    saved = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M:%S")
    name = size = count = loss = "-"
    note = ""
    try:
        format = recognize(path, formats.all)
        if format is None:
            return str(path), name, size, count, saved, loss, "unknown format"
        name, files = format.name, Checkpoint(path, format).files()
        size, count = size_text(sum(files.values())), str(len(files))
        found = format.read_values(path).get("evaluation_loss")
        loss = f"{found:.4f}" if isinstance(found, float) else "-"
    except CheckpointError as error:
        note = f"damaged: {error}"
    except OSError as error:
        note = f"unreadable: {reason(error)}"
    return str(path), name, size, count, saved, loss, note
