"""The tables of a job as it is measured. Imports no torch."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

HOOK = "bench-turns"
"""The hook that a measured job has besides its own."""
SCRATCH = "HPCTRAIN_BENCH_DIRECTORY"
"""The variable that tells ranks where to make their directories; the one for temporary files without it."""
_LEFT_OUT = ("logger", "metric", "profile", "scheduler", "checkpoint")
# steps of a job that counts epochs: more than any measurement takes
_MANY = 10_000


def measured_tables(tables: Mapping[str, Any], steps: int, directory: str) -> dict[str, Any]:
    """The tables of a job that trains in `directory`, and longer than `steps`, without checkpoints, evaluations and loggers."""
    made = {name: copy.deepcopy(table) for name, table in tables.items() if name not in _LEFT_OUT}
    job = {key: value for key, value in made.get("job", {}).items() if key not in ("time_limit", "epochs")}
    job["steps"] = max(int(job.get("steps", _MANY)), steps + 1)
    made["job"] = {**job, "output_dir": directory}
    made.pop("evaluation", None)
    made["hook"] = [*made.get("hook", []), {"name": HOOK}]
    plugins = made.setdefault("plugins", {})
    plugins["load"] = [*plugins.get("load", []), "hpctrain_tools.bench.turns"]
    return made


def with_batch(tables: Mapping[str, Any], key: str, size: int) -> dict[str, Any]:
    """The tables with another global batch."""
    return {**tables, "batch": {**tables.get("batch", {}), key: size}}
