"""Rows of metrics.jsonl as typed values. The file may be another person's: values of the wrong type count as absent."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from hpctrain.training.progress import slowest_rank

MOST = 2**63
"""More than any count of a run; a crafted file may hold any number."""
_EVALUATION = "evaluation_"


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for. cause: "data", "compute", "save" or "host"; excess_seconds: a step, over the others."""

    rank: int
    node: str
    cause: str
    excess_seconds: float


@dataclass(frozen=True)
class Step:
    """The row of an optimizer step; docs/metrics.md describes its keys."""

    step: int
    time: float | None = None
    epoch: float | None = None
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    step_seconds: float | None = None
    counts: str = "samples"
    """The unit of `per_second`: "tokens" or "samples"."""
    per_second: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the parts of the time since the row before."""
    memory_max: float | None = None
    memory_mean: float | None = None
    mfu: float | None = None
    flops: float | None = None
    """The model's operations per second."""
    goodput: float | None = None
    pipeline_bubble: float | None = None
    """The share of the step in which a pipeline's rank has nothing to compute."""
    slowest: str = ""
    """The slowest rank in words."""
    straggler: Straggler | None = None
    exposed: Mapping[str, float] = field(default_factory=dict)
    """Seconds that rank 0 waited for communication, by "AXIS.OPERATION"."""
    hidden: Mapping[str, float] = field(default_factory=dict)
    """Seconds of communication behind which rank 0 computed."""
    bandwidth: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second of rank 0's operations."""
    guard: str = ""
    """The guard that found something in the step."""
    skipped: bool = False
    skipped_steps: int | None = None
    rollbacks: int | None = None


@dataclass(frozen=True)
class Evaluation:
    """The row of an evaluation."""

    step: int
    measured: Mapping[str, float | None]
    """Values by name without `evaluation_`; None if not finite."""

    @property
    def row(self) -> dict[str, Any]:
        """The row as metrics.jsonl has it, for BestSoFar."""
        return {"step": self.step, **{f"{_EVALUATION}{name}": value for name, value in self.measured.items()}}


Row: TypeAlias = Step | Evaluation


def is_evaluation(line: bytes) -> bool:
    """Whether a line may be an evaluation's row; cheap."""
    return b'"evaluation_' in line and b'"step_seconds"' not in line


def read_row(line: bytes) -> Row | None:
    """The row in a line; None if there is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = count_of(row.get("step")) if isinstance(row, dict) else None
    if step is None:
        return None
    measured = {name.removeprefix(_EVALUATION): value for name, value in row.items() if name.startswith(_EVALUATION)}
    if measured and "step_seconds" not in row:  # hooks may add any keys to a step's row
        shown = {name: number_of(value) for name, value in measured.items() if name not in ("tokens", "samples")}
        return Evaluation(step, shown)
    return _step(step, row)


def _step(step: int, row: Mapping[str, Any]) -> Step:
    counts = "tokens" if "tokens_per_second" in row else "samples"
    memory, guard = _numbers_of(row, "memory_bytes"), row.get("guard")
    numbers = {
        key: number_of(row.get(key))
        for key in ("time", "epoch", "loss", "lr", "grad_norm", "step_seconds", "mfu", "goodput", "pipeline_bubble")
    }
    return Step(
        step,
        **numbers,
        counts=counts,
        per_second=number_of(row.get(f"{counts}_per_second")),
        parts=_numbers_of(row, "seconds"),
        memory_max=memory.get("rank_max"),
        memory_mean=memory.get("rank_mean"),
        flops=number_of(row.get("model_flops_per_second")),
        slowest=slowest_rank(row),
        straggler=_straggler(row.get("straggler")),
        exposed=_numbers_of(row, "exposed_seconds"),
        hidden=_numbers_of(row, "hidden_seconds"),
        bandwidth=_numbers_of(row, "bytes_per_second"),
        guard=guard if isinstance(guard, str) else "",
        skipped=row.get("skipped") is True,
        skipped_steps=count_of(row.get("skipped_steps")),
        rollbacks=count_of(row.get("rollbacks")),
    )


def _numbers_of(row: Mapping[str, Any], key: str) -> dict[str, float]:
    """The finite numbers of a key whose value is an object."""
    found = row.get(key)
    if not isinstance(found, dict):
        return {}
    return {name: value for name, one in found.items() if (value := number_of(one)) is not None}


def _straggler(found: object) -> Straggler | None:
    if not isinstance(found, dict):
        return None
    rank, excess = count_of(found.get("rank")), number_of(found.get("excess_seconds"))
    node, cause = (value if isinstance(value := found.get(key), str) else "" for key in ("node", "cause"))
    return None if rank is None or excess is None else Straggler(rank, node, cause, excess)


def count_of(value: object) -> int | None:
    """An integer of 64 bits that is not negative."""
    return value if type(value) is int and 0 <= value < MOST else None


def number_of(value: object) -> float | None:
    """A finite number."""
    if type(value) is int:
        return float(value) if -MOST < value < MOST else None
    return value if isinstance(value, float) and math.isfinite(value) else None
