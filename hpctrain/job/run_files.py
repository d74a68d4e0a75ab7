"""Names in the directory of a run. `contracts/scheduler.py` has those of a submitted one."""

from __future__ import annotations

from pathlib import Path

RESOLVED = "job.resolved.toml"
"""The job with every default written out, as its newest start found it."""
METRICS = "metrics.jsonl"
"""The rows of steps and evaluations."""
STARTS = "starts.jsonl"
"""A line for each start, and one for each time that steps were lost."""
CHECKPOINTS = "checkpoints"
LOGS = "log"


def log_of(directory: Path, rank: int) -> Path:
    """A rank's log."""
    return directory / LOGS / f"rank-{rank:05d}.log"
