"""hpctrain on a Ray cluster: `run` trains a job, `Training` is stepped from outside, `hpctrain submit --to ray` sends a job."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain_ray.learner import Learner
    from hpctrain_ray.running import Result, run
    from hpctrain_ray.training import Training

__all__ = ["Learner", "Result", "Training", "run"]

_HOMES = {"Learner": "learner", "Result": "running", "Training": "training", "run": "running"}


def __getattr__(name: str) -> Any:
    """Names that need torch, on first use: a Ray worker that only attends a rank must not import it."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
