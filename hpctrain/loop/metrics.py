"""One row per step: gathered over the ranks, written to metrics.jsonl, and what loggers get."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, StrictInt, ValidationError

from hpctrain.devices import is_accelerator, peak_memory
from hpctrain.errors import reason
from hpctrain.files import open_regular, reading, replacing

LOG = logging.getLogger("hpctrain")
_LONGEST_ROW = 2**20
"""Bytes of a line of metrics.jsonl."""


@dataclass
class StepTimes:
    """Seconds of the current step that went into data and into waiting for communication."""

    data: float = 0.0
    communication: float = 0.0
    begin: float = field(default_factory=time.perf_counter)

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Time the loop waits for samples."""
        begin = time.perf_counter()
        yield
        self.data += time.perf_counter() - begin

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Time the loop waits for other ranks (communication behind backward is not in it)."""
        begin = time.perf_counter()
        yield
        self.communication += time.perf_counter() - begin

    @property
    def seconds(self) -> float:
        """Since the step began."""
        return time.perf_counter() - self.begin


def memory_bytes(device: torch.device) -> int:
    """The most memory that this rank has held: on its accelerator, or of the process."""
    if is_accelerator(device):
        return peak_memory(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def gather_row(values: list[float]) -> torch.Tensor:
    """Every rank's `values`: (ranks, values) in float64 on the CPU, equal on all ranks."""
    mine = torch.tensor(values, dtype=torch.float64)
    everyone = torch.empty(dist.get_world_size(), len(values), dtype=torch.float64)
    dist.all_gather_single(everyone, mine[None])
    return everyone


class MetricsFile:
    """metrics.jsonl on rank 0: a JSON object per line; what is not finite is null."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        """Rows after `resumed_step` belong to steps that are done again: they are dropped. OSError if it can't be written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.writelines(_rows_until(path, resumed_step) if resumed_step else [])
        self._path = path
        # open for the whole run
        self._file = open(open_regular(path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0)  # noqa: SIM115
        self._waiting = b""

    def write(self, row: dict[str, Any]) -> None:
        """Append `row` at once, so that whoever follows the file sees it.

        Where there is no room (the disk is full), rows wait until there is some: that is no reason to end a training.
        """
        waited, self._waiting = bool(self._waiting), self._waiting + json.dumps(finite(row)).encode() + b"\n"
        try:
            self._append()
        except OSError as error:
            if not waited:
                LOG.warning("%s can't be written, its rows wait until it can: %s", self._path, reason(error))

    def close(self) -> None:
        try:
            self._append()
            self._file.close()
        except OSError as error:
            lost = self._waiting.count(b"\n")
            LOG.warning("%s could not be written, it lacks the last %d rows: %s", self._path, lost, reason(error))

    def _append(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]


def finite(value: Any) -> Any:
    """`value` with None for each number that JSON has not."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Row(BaseModel):
    """What a resume looks at of a row."""

    step: StrictInt


def _rows_until(path: Path, step: int) -> Iterator[bytes]:
    """Whole lines: what else a crash or a power failure left is left out."""
    if not os.path.lexists(path):
        return
    with reading(path) as fd, open(fd, "rb", closefd=False) as file:
        while line := file.readline(_LONGEST_ROW):
            if not line.endswith(b"\n"):  # cut short, or no row: what follows may have no end
                return
            with suppress(ValidationError):
                if _Row.model_validate_json(line).step <= step:
                    yield line
