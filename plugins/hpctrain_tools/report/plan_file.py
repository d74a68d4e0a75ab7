"""The plan of a job as `hpctrain plan --json` writes it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hpctrain.base.safe_files import read_bytes
from hpctrain.toolkit.commands import UsageError, reason

_Bytes = Annotated[int, Field(ge=0, le=2**63)]


class _Read(BaseModel):
    model_config = ConfigDict(strict=True)


class PlannedSave(_Read):
    """The save of a rank. peak: the most bytes on the device in it."""

    peak: _Bytes


class PlannedRank(_Read):
    """The bytes of a rank: in all of its parts the most, at the peak of a step by what they are of, in the start and in a save."""

    rank: int
    most_bytes: _Bytes
    peak_bytes: _Bytes
    at_peak_bytes: dict[str, _Bytes]
    start_bytes: _Bytes
    save: PlannedSave


class JobPlan(_Read):
    """The plan: a rank for each part of the model. job: the tables of the job on which memory depends, with their defaults."""

    ranks: int = Field(ge=1)
    axes: dict[str, int]
    job: dict[str, Any]
    of_ranks: list[PlannedRank] = Field(min_length=1)

    @property
    def largest(self) -> PlannedRank:
        """The rank that needs the most memory."""
        return max(self.of_ranks, key=lambda one: one.most_bytes)

    @property
    def mean_bytes(self) -> float:
        """The mean over all ranks: each part of the model has as many."""
        return sum(one.most_bytes for one in self.of_ranks) / len(self.of_ranks)


def read_plan(path: Path) -> JobPlan:
    """Read the file. Raises UsageError for one that is no plan."""
    try:
        return JobPlan.model_validate_json(read_bytes(Path(os.path.realpath(path))))
    except OSError as error:
        why = f"it cannot be read: {reason(error)}"
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        why = f"it is no plan: {where}{': ' if where else ''}{first['msg']}"
    raise UsageError(f"--plan {path}: {why}; expected what `hpctrain plan JOB.toml -n RANKS --json` prints")
