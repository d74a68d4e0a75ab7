"""Numbers of the rows for monitoring: the newest value of each, and how much this process has trained."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpctrain.base.launcher_variables import job_id
from hpctrain_plugins.logger.rows import is_evaluation, is_number, resolved_job

KIND = "kind"
"""The label of numbers that a row has in a table, such as "rank_max" of `memory_bytes`."""
# names of the counters. A row's number of that name is one of its batch.
_COUNTED = ("steps", "tokens", "samples")


class Series:
    """The newest values. One thread takes rows while others read: each mapping is replaced, never changed."""

    def __init__(self) -> None:
        self.gauges: Mapping[str, Mapping[str, float]] = {}
        """Values by name, then by kind; "" is the kind of a number that stands alone."""
        self.totals: Mapping[str, int] = {"steps": 0}
        """Steps, and tokens or samples, since this process began. Steps that are trained again count again."""

    def take(self, row: Mapping[str, Any]) -> None:
        """Take over a row's numbers."""
        self.gauges = {**self.gauges, **dict(_gauges(row))}
        if not is_evaluation(row):
            trained = {name: row[name] for name in ("tokens", "samples") if name in row} | {"steps": 1}
            self.totals = {**self.totals, **{name: self.totals.get(name, 0) + more for name, more in trained.items()}}


def run_labels(output_dir: Path) -> dict[str, str]:
    """The name of the run, and of the scheduler's job if it is in one."""
    job, number = resolved_job(output_dir)["job"]["name"], job_id()
    return {"run": job, **({"job_id": number} if number else {})}


def _gauges(row: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, float]]]:
    """Each name with its values by kind. Tables in tables are left out: of a histogram, each parameter would be a series."""
    for key, value in row.items():
        values = value if isinstance(value, Mapping) else {"": value}
        found = {str(kind): float(one) for kind, one in values.items() if is_number(one)}
        if found:
            yield _name(key), found


def _name(key: str) -> str:
    """The name of a key's series, in the characters that every monitoring system takes."""
    name = re.sub(r"\W", "_", key, flags=re.ASCII)
    if name == "time":
        return "last_row_timestamp_seconds"
    return f"batch_{name}" if name in _COUNTED else name
