"""Reports a run: rank 0's screen, metrics.jsonl and the loggers."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpctrain.base.errors import EnvironmentUnfitError, TrainingError, UsageError, reason
from hpctrain.base.safe_files import METRICS, open_regular, reading, replacing
from hpctrain.contracts.identity import Identity
from hpctrain.contracts.logger import Logger, LogWriter
from hpctrain.job.tables import KeepBestTable
from hpctrain.ranks.rank_channel import RankChannel
from hpctrain.training.console import Console
from hpctrain.training.progress import BestSoFar
from hpctrain.training.starts import first_start, note_lost

LOG = logging.getLogger("hpctrain")
_STRICT = json.JSONEncoder(allow_nan=False)

# the parts of a step's time that train
_STEPPING = ("forward", "backward", "communication", "optimizer", "other")
# the longest line of metrics.jsonl, in bytes
_LONGEST_ROW = 2**20


class Report:
    """Active on rank 0, silent on the other ranks."""

    def __init__(
        self,
        identity: Identity,
        channel: RankChannel,
        best_by: KeepBestTable | None = None,
        begin: float | None = None,
    ) -> None:
        """best_by: the metric by which an evaluation is the best. begin: of the run, on time.monotonic(); None: now."""
        self._speaks = identity.rank == 0
        self._best = BestSoFar.by(best_by)
        self._console = Console(identity, channel, self._best, begin)
        self._metrics: MetricsFile | None = None
        # the loggers that are open, with their names
        self._writers: list[tuple[str, LogWriter]] = []
        self._goodput = Goodput(0.0)

    def open(self, output_dir: Path, loggers: Sequence[Logger], step: int, under_way: bool = False) -> None:
        """Open metrics.jsonl and the loggers for rows after `step`.

        Raises UsageError if metrics.jsonl can't be written, EnvironmentUnfitError if a logger's files can't. under_way: the run has
        trained already, and does without a logger that can't be opened.
        """
        if not self._speaks:
            return
        path = output_dir / METRICS
        self._goodput = Goodput(first_start(output_dir, time.time()))
        try:
            self._metrics = MetricsFile(path, step, self._goodput, self._best)
        except OSError as error:
            raise UsageError(f"[job] output_dir: {path} cannot be written: {reason(error)}") from None
        if self._goodput.lost_steps:
            note_lost(output_dir, step, self._goodput.lost_steps, self._goodput.lost_seconds)
        for logger in loggers:
            try:
                self._writers.append((logger.name, logger.open(output_dir, step)))
            except Exception as error:
                if under_way:
                    _tell_dropped(logger.name, error)
                    continue
                self.close()  # the loggers before it have threads, processes and ports
                if isinstance(error, OSError):
                    raise EnvironmentUnfitError(f"[[logger]] name = {logger.name!r}: {reason(error)}") from error
                raise

    def go_back(self, output_dir: Path, loggers: Sequence[Logger], step: int) -> None:
        """Drop the rows after `step`, as a resume does. Raises UsageError if metrics.jsonl can't be written."""
        if self._speaks:
            self._close_files()
            self._best.forget()
            self.open(output_dir, loggers, step, under_way=True)

    def say(self, message: str) -> None:
        """Print a line on the screen."""
        self._console.line(message)

    def row(self, row: Mapping[str, Any], steps: int, counts: str, remark: str = "") -> None:
        """Report a row of metrics. counts: "tokens" or "samples". remark: extra text for the screen."""
        if self._metrics is None:
            return
        plain = plain_row(row)
        self._goodput.see(plain)
        if "seconds" in plain and (share := self._goodput.share(time.time())) is not None:
            plain["goodput"] = share
        self._metrics.write(plain)
        self._ask_writers(lambda writer: writer.log(copy.deepcopy(plain)))  # a logger may change its row
        self._console.progress(plain, steps, counts, remark)

    def close(self) -> None:
        """The run has ended."""
        self._console.close()
        self._close_files()

    def _close_files(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        self._ask_writers(lambda writer: writer.close())
        self._metrics, self._writers = None, []

    def _ask_writers(self, ask: Callable[[LogWriter], None]) -> None:
        """Drop a writer that raises (its server or disk is gone), with a warning. metrics.jsonl has every row."""
        for writer in list(self._writers):  # a copy: one that fails leaves the list
            name, one = writer
            try:
                ask(one)
            except Exception as error:
                self._writers.remove(writer)
                _tell_dropped(name, error)


def _tell_dropped(logger: str, error: Exception) -> None:
    LOG.warning("logger %s failed and gets no more rows: %s: %s", logger, type(error).__name__, error)
    LOG.info("where logger %s failed", logger, exc_info=error)


class Goodput:
    """The share of the wall time since a run's first start that went into steps that count; adds up their rows.

    A step that a resume or a rollback drops, and trains again, does not count; nor do starts, evaluations, saves, waiting for data,
    and the time in which the job was not running. (Google's ML Productivity Goodput, 2024, defines the term so.)
    """

    def __init__(self, first_start: float) -> None:
        """first_start: seconds since 1970."""
        self._first_start, self._seconds = first_start, 0.0
        self.lost_steps, self.lost_seconds = 0, 0.0
        """Steps whose rows were dropped, and all their time."""

    def see(self, row: Mapping[str, Any]) -> None:
        """A row that counts."""
        self._seconds += sum(seconds_of(row, _STEPPING))

    def lose(self, row: Mapping[str, Any]) -> None:
        """A row that is dropped."""
        found = seconds_of(row)
        self.lost_steps, self.lost_seconds = self.lost_steps + bool(found), self.lost_seconds + sum(found)

    def share(self, now: float) -> float | None:
        """The goodput at a time, in seconds since 1970; None if the clock has been set back."""
        return self._seconds / (now - self._first_start) if now > self._first_start else None


def seconds_of(row: Mapping[str, Any], parts: tuple[str, ...] | None = None) -> list[float]:
    """The seconds of these parts, or of all, in a row; the row may be another program's."""
    found = row.get("seconds")
    if not isinstance(found, Mapping):
        return []
    return [
        float(one) for name, one in found.items() if isinstance(one, (int, float)) and (parts is None or name in parts)
    ]


class MetricsFile:
    """metrics.jsonl on rank 0: a JSON object per line. Non-finite numbers are null."""

    def __init__(self, path: Path, resumed_step: int, goodput: Goodput, best: BestSoFar) -> None:
        """Drops the rows after `resumed_step`: their steps run again. Raises OSError if the file can't be written. goodput, best:
        see the rows that stay; goodput loses the others."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:  # a reader sees the old rows or the new ones
            file.writelines(_rows_until(path, resumed_step, goodput, best))
        self._path = path
        # open for the whole run
        self._file = open(open_regular(path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0)  # noqa: SIM115
        self._waiting = b""

    def write(self, row: dict[str, Any]) -> None:
        """Append `row` at once, so that readers who follow the file see it.

        If the disk is full, rows wait in memory until there is room: a full disk does not end a training here.
        """
        waited, self._waiting = bool(self._waiting), self._waiting + encoded(row)
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
    """The row with tensors and NumPy numbers of one element as numbers."""
    return {
        name: value.item()
        if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        else value
        for name, value in row.items()
    }


def encoded(row: Mapping[str, Any]) -> bytes:
    """A line of JSON, with null for numbers that are not finite. Raises TrainingError for a value that JSON can't hold."""
    with suppress(TypeError, ValueError):  # the second for numbers that are not finite
        return _STRICT.encode(row).encode() + b"\n"
    for name, value in row.items():
        try:
            json.dumps(value)
        except TypeError:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise TrainingError(
                f"a hook has put {name!r} into the metrics of step {row.get('step')}: found a {type(value).__name__}{shape}, "
                "expected a number or text, or a list or dict of them"
            ) from None
    return json.dumps(finite(row)).encode() + b"\n"


def finite(value: Any) -> Any:
    """`value` with None for NaN and infinities, which JSON lacks."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rows_until(path: Path, step: int, goodput: Goodput, best: BestSoFar) -> Iterator[bytes]:
    """The complete lines; fragments left by a crash or a power failure are dropped."""
    if not os.path.lexists(path):
        return
    with reading(path) as fd, open(fd, "rb", closefd=False) as file:
        while line := file.readline(_LONGEST_ROW):
            if not line.endswith(b"\n"):  # cut short, or not a row: the rest may be endless
                return
            with suppress(ValueError, LookupError, TypeError, RecursionError):  # others may have written it
                row = json.loads(line)
                if row["step"] <= step:
                    goodput.see(row)
                    best.see(row)
                    yield line
                else:
                    goodput.lose(row)
