"""Checks what a job names outside of itself: its weights and its data."""

from __future__ import annotations

import os

from hpctrain.base.errors import EXIT_CHECKPOINT, HpctrainError, reason
from hpctrain.checkpoint.weights import open_weights
from hpctrain.data.opening import Data, open_data
from hpctrain.job.parts import Parts
from hpctrain.job.problems import PlacedProblem
from hpctrain.job.tables import Job


def open_outside(job: Job, parts: Parts) -> tuple[Data | None, list[PlacedProblem]]:
    """The data, and the problems of weights and data."""
    problems = _weights_problems(job, parts)
    try:
        return open_data(job, parts), problems
    except HpctrainError as error:
        return None, [*problems, PlacedProblem(("dataset", "name"), str(error), error.exit_code)]


def _weights_problems(job: Job, parts: Parts) -> list[PlacedProblem]:
    weights, key = job.model.weights, ("model", "weights")
    if weights is None:
        return []
    if not os.access(weights, os.R_OK):
        why = f"[model] weights: there are none at {weights}, or no permission to read them"
        return [PlacedProblem(key, f"{why}; expected a path (names of the Hugging Face hub are not taken)")]
    try:
        open_weights(weights, parts.formats)  # reads only their table
    except (HpctrainError, OSError) as error:
        code = error.exit_code if isinstance(error, HpctrainError) else EXIT_CHECKPOINT
        return [PlacedProblem(key, f"[model] weights: {reason(error)}", code)]
    return []
