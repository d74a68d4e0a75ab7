"""Prepares rows and the job for loggers."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli

from hpctrain.api import TABLE_BYTES, read_all, reading


def flat(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The single values by dotted keys: {"memory_bytes": {"rank_max": 1}} gives ("memory_bytes.rank_max", 1)."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_evaluation(row: Mapping[str, Any]) -> bool:
    return "evaluation_loss" in row


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The row's numbers by dotted keys, without the step and the time."""
    return {key: value for key, value in flat(row) if is_number(value) and key not in ("step", "time")}


def kept_rows(output_dir: Path, resumed_step: int) -> Iterator[dict[str, Any]]:
    """The rows of metrics.jsonl up to the step after which a run goes on: a store may lack some after a kill, or be a new one."""
    path = output_dir / "metrics.jsonl"
    if not resumed_step or not os.path.lexists(path):
        return
    with reading(path) as fd, open(fd, "rb", closefd=False) as file:
        for line in file:
            with suppress(ValueError, RecursionError):
                row = json.loads(line, object_hook=_with_nan)
                if isinstance(row, dict) and type(row.get("step")) is int and row["step"] <= resumed_step:
                    yield row


def _with_nan(table: dict[str, Any]) -> dict[str, Any]:
    """JSON has null for numbers that are not finite."""
    return {key: math.nan if value is None else value for key, value in table.items()}


def resolved_job(output_dir: Path) -> dict[str, Any]:
    """Every key of the job with its default, by tables."""
    path = output_dir / "job.resolved.toml"
    with reading(path) as fd:
        return tomli.loads(read_all(fd, path, TABLE_BYTES).decode())
