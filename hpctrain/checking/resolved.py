"""job.resolved.toml, the job with every default written out; and the comparison of two jobs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import tomli
import tomli_w
from pydantic import BaseModel

from hpctrain.base.errors import UsageError, reason
from hpctrain.base.safe_files import RESOLVED, read_bytes, replacing
from hpctrain.checking.check import CheckedJob
from hpctrain.checking.choices import placed
from hpctrain.job.output_lock import OutputLock
from hpctrain.job.raw import value_at
from hpctrain.job.toml import written

# keys that must match for a directory's checkpoints to belong to this job
_IDENTITY = ("job.name", "job.seed", "model", "dataset")
# exceptions, which may differ: a resume reads no first weights, and the others leave the samples as they are
_FREE = (
    "model.weights",
    "model.weights_strict",
    "dataset.workers",
    "dataset.prefetch",
    "dataset.start_method",
    "dataset.cache",
)
# keys that must match to resume from another run's checkpoint. The data is compared by its fingerprint.
_TRAINED = ("job.seed", "model")


def resolved_tables(checked: CheckedJob) -> dict[str, Any]:
    """Every table with its defaults, as a job file of the same job."""
    job, parts = checked.job, checked.parts
    tables: dict[str, Any] = job.model_dump(mode="json", exclude_none=True)  # TOML can't write None
    tables["job"]["output_dir"] = str(job.output_dir)
    for _, key, plugin in placed(parts):
        options = plugin.options  # the user's own callables have a dict of them
        is_model = isinstance(options, BaseModel)
        value_at(tables, key).update(options.model_dump(mode="json", exclude_none=True) if is_model else options)
    return tables


def write_resolved(checked: CheckedJob, ranks: int, lock: OutputLock) -> None:
    """Lock the output directory and write the file. Raises UsageError if it holds another job's files or is in use."""
    directory, tables = checked.job.output_dir, resolved_tables(checked)
    path = directory / RESOLVED
    refuse_other_job(path, tables)
    try:
        directory.mkdir(checked.job.job.mode, parents=True, exist_ok=True)
        lock.take(directory)
        refuse_other_job(path, tables)  # again: two jobs that started together may both have found no file
        text = f"# Every key of the job as it ran, on {ranks} rank{'s' * (ranks > 1)}.\n{tomli_w.dumps(tables)}"
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise UsageError(f"[job] output_dir: {directory} cannot be written to: {reason(error)}") from None


def refuse_other_job(path: Path, tables: dict[str, Any]) -> None:
    """Raise UsageError if `path` is the resolved file of another job that has a checkpoint."""
    try:
        different = _differences(path, tables, _IDENTITY)
    except (FileNotFoundError, NotADirectoryError):
        return  # a new directory; write_resolved reports what is none
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"[job] output_dir: {path} cannot be read ({reason(error)}); use another output_dir") from None
    if different and any(path.parent.glob("checkpoints/step-*")):
        raise UsageError(
            f"[job] output_dir: {path.parent} holds another job ({'; '.join(different[:3])}); "
            "use another output_dir, or --resume never, which sets that one aside"
        )


def refuse_other_run(checkpoint: Path, tables: dict[str, Any]) -> None:
    """Raise UsageError if the run of `checkpoint` had another model or seed. Without its resolved file nothing is compared.

    Tensor shapes are not enough: they are the same with another number of attention heads.
    """
    path = Path(os.path.realpath(checkpoint)).parent.parent / RESOLVED  # of RUN/checkpoints/step-N, which may be a link
    try:
        different = _differences(path, tables, _TRAINED)
    except (OSError, ValueError, RecursionError):
        return  # a checkpoint may be copied without its run
    if different:
        raise UsageError(
            f"--resume {checkpoint}: it is from another training ({'; '.join(different[:3])}; see {path}); use the same values in "
            f'this job, or start anew with its weights: [model] weights = "{checkpoint}"'
        )


def _differences(path: Path, now: dict[str, Any], prefixes: tuple[str, ...]) -> list[str]:
    """The differences to a resolved file in keys that begin with one of `prefixes`, without the exceptions."""
    before = tomli.loads(read_bytes(path).decode())
    old, new = (dict(_flat(tables)) for tables in (before, now))
    keys = [key for key in sorted(old.keys() | new.keys()) if key.startswith(prefixes) and key not in _FREE]
    return [
        f"{key} was {written(old.get(key))}, is {written(new.get(key))}" for key in keys if old.get(key) != new.get(key)
    ]


def _flat(tables: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    items: list[tuple[str, Any]] = []
    for key, value in tables.items():
        items += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return items
