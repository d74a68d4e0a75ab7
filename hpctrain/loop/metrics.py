"""Metrics, one row per step: gathered over the ranks, written to metrics.jsonl, passed to loggers."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel, StrictInt, ValidationError

from hpctrain.devices import is_accelerator, peak_memory
from hpctrain.errors import TrainingError, reason
from hpctrain.files import open_regular, reading, replacing

LOG = logging.getLogger("hpctrain")
_LONGEST_ROW = 2**20
"""The longest line of metrics.jsonl, in bytes."""


@dataclass
class StepTimes:
    """Seconds that the current step waited for data and for communication."""

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
        """Time the loop waits for other ranks, without communication that overlaps with backward."""
        begin = time.perf_counter()
        yield
        self.communication += time.perf_counter() - begin

    @property
    def seconds(self) -> float:
        """Since the step began."""
        return time.perf_counter() - self.begin


def memory_bytes(device: torch.device) -> int:
    """The peak memory of this rank: on its accelerator, else of the process."""
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
    """metrics.jsonl on rank 0: a JSON object per line. Non-finite numbers are null."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        """Drops the rows after `resumed_step`: their steps run again. Raises OSError if the file can't be written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.writelines(_rows_until(path, resumed_step) if resumed_step else [])
        self._path = path
        # open for the whole run
        self._file = open(open_regular(path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0)  # noqa: SIM115
        self._waiting = b""

    def write(self, row: dict[str, Any]) -> None:
        """Append `row` at once, so that readers who follow the file see it.

        If the disk is full, rows wait in memory until there is room: a full disk does not end a training here.
        """
        waited, self._waiting = bool(self._waiting), self._waiting + json.dumps(finite(row)).encode() + b"\n"
        try:
            self._append()
        except OSError as error:
            if not waited:
                LOG.warning("%s can't be written; rows are kept in memory until it can: %s", self._path, reason(error))

    def close(self) -> None:
        try:
            self._append()
            self._file.close()
        except OSError as error:
            lost = self._waiting.count(b"\n")
            LOG.warning("%s could not be written; its last %d rows are missing: %s", self._path, lost, reason(error))

    def _append(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with tensors and NumPy numbers of one element as numbers. Raises TrainingError for a value that JSON can't hold."""
    found = {
        name: value.item()
        if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        else value
        for name, value in row.items()
    }
    for name, value in found.items():
        try:
            json.dumps(finite(value))
        except TypeError:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise TrainingError(
                f"a hook has put {name!r} into the metrics of step {row.get('step')}: found a {type(value).__name__}{shape}, "
                "expected a number or text, or a list or dict of them"
            ) from None
    return found


def finite(value: Any) -> Any:
    """`value` with None for NaN and infinities, which JSON lacks."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Row(BaseModel):
    """The parts of a row that a resume reads."""

    step: StrictInt


def _rows_until(path: Path, step: int) -> Iterator[bytes]:
    """The complete lines; fragments left by a crash or a power failure are dropped."""
    if not os.path.lexists(path):
        return
    with reading(path) as fd, open(fd, "rb", closefd=False) as file:
        while line := file.readline(_LONGEST_ROW):
            if not line.endswith(b"\n"):  # cut short, or not a row: the rest may be endless
                return
            with suppress(ValidationError):
                if _Row.model_validate_json(line).step <= step:
                    yield line
