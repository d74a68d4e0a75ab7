"""The status of a run by the files in its directory, whoever started it. The directory may be another person's."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.base.errors import reason
from hpctrain.base.safe_files import read_bytes, reading
from hpctrain.checking.resolved import FILE_NAME
from hpctrain.checkpoint.directory import CheckpointDirectory
from hpctrain.job.output_lock import owner_of
from hpctrain.job.toml import first_beyond, parse

_TAIL = 2**20
"""Bytes at the end of metrics.jsonl in which the last complete row must be."""


def standing(directory: Path) -> str | None:
    """ "running (process 12 on node3), step 17 of 40, loss 1.0926, newest checkpoint runs/NAME/checkpoints/step-00000010"; None for
    a directory without a run."""
    path = directory / FILE_NAME
    if not path.is_file():
        return None
    row = last_row(directory / "metrics.jsonl") or {}
    job: Any = {}
    with suppress(OSError, ValueError):
        tables = parse(read_bytes(path).decode())
        job = None if first_beyond(tables) else tables.get("job")
    job = job if isinstance(job, dict) else {}
    try:
        owner = owner_of(directory)
        word = f"running ({owner})" if owner else "done" if _is_done(row, job) else "not running"
    except OSError as error:
        unknown = f"running or stopped (its lock cannot tell: {reason(error)})"
        word = "done" if _is_done(row, job) else unknown
    loss = row.get("loss")
    told = [word, *_progress(row, job), *([f"loss {loss:.4f}"] if isinstance(loss, float) else [])]
    with suppress(OSError):
        newest = CheckpointDirectory(directory / "checkpoints").candidates()
        told += [f"newest checkpoint {newest[0]}"] if newest else ["no checkpoint"]
    return ", ".join(told)


def _progress(row: dict[str, Any], job: dict[str, Any]) -> list[str]:
    """ "step 17 of 40", or "step 17, epoch 1.25 of 2"; nothing before the first step."""
    step, epoch, steps, epochs = row.get("step"), row.get("epoch"), job.get("steps"), job.get("epochs")
    if not isinstance(step, int):
        return ["before its first step"]
    if isinstance(steps, int):
        return [f"step {step} of {steps}"]
    known = isinstance(epoch, float) and isinstance(epochs, int | float)
    return [f"step {step}", *([f"epoch {epoch:.2f} of {epochs:g}"] if known else [])]


def _is_done(row: dict[str, Any], job: dict[str, Any]) -> bool:
    """Whether the job's last step is trained: the next one would be beyond its end."""
    step, epoch, steps, epochs = row.get("step"), row.get("epoch"), job.get("steps"), job.get("epochs")
    if not isinstance(step, int) or step < 1:
        return False
    if isinstance(steps, int):
        return step >= steps
    if not isinstance(epoch, float) or not isinstance(epochs, int | float):
        return False
    return epoch + epoch / step > epochs * (1 + 1e-9)


def last_row(path: Path) -> dict[str, Any] | None:
    """The last complete row of a step; the run may be writing the next one."""
    with suppress(OSError), reading(path) as fd, open(fd, "rb", closefd=False) as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL))
        for line in reversed(file.read(_TAIL).split(b"\n")):
            with suppress(ValueError, RecursionError):
                row: Any = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int) and "evaluation_loss" not in row:
                    return None if first_beyond(row) else row
    return None
