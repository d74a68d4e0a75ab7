"""hpctrain: a plugin-based PyTorch trainer for HPC clusters, over MPI.

import hpctrain
job = hpctrain.load_job("job.toml", ["job.steps=100"])
hpctrain.run(job)
module = hpctrain.load("runs/NAME/checkpoints/latest")
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.version import __version__

if TYPE_CHECKING:
    from hpctrain_tools.plan.plan import plan

    from hpctrain.job.tables import Job
    from hpctrain.own_loops.loop import Loop, own_loop
    from hpctrain.training.loading import load
    from hpctrain.training.meters.memory import memory
    from hpctrain.training.rank import run

__all__ = ["Job", "Loop", "__version__", "load", "load_job", "memory", "own_loop", "plan", "run"]


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """The job in a file, checked; `overrides` are "table.key=value". Raises HpctrainError with every problem."""
    from hpctrain.checking.check import check
    from hpctrain.job.reading import read_job

    return check(read_job(Path(path), overrides), None).job


_HOMES = {
    "Job": "hpctrain.job.tables",
    "Loop": "hpctrain.own_loops.loop",
    "load": "hpctrain.training.loading",
    "memory": "hpctrain.training.meters.memory",
    "own_loop": "hpctrain.own_loops.loop",
    "plan": "hpctrain_tools.plan.plan",
    "run": "hpctrain.training.rank",
}


def __getattr__(name: str) -> Any:
    """Names that need torch, on first use: importing hpctrain alone must not import it (`hpctrain --help` is quick)."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
