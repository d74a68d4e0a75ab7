"""The destinations of metrics besides the screen: metrics.jsonl and the loggers."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.contracts.logger import Logger, LogWriter
from hpctrain.errors import EnvironmentUnfitError, UsageError, reason
from hpctrain.loop.metrics import MetricsFile

LOG = logging.getLogger("hpctrain")


class Records:
    """The records of a run, on rank 0."""

    def __init__(self, output_dir: Path, loggers: Sequence[Logger], resumed_step: int) -> None:
        """Raises UsageError if metrics.jsonl can't be written, EnvironmentUnfitError if a logger's files can't."""
        path = output_dir / "metrics.jsonl"
        try:
            self._metrics = MetricsFile(path, resumed_step)
        except OSError as error:
            raise UsageError(f"[job] output_dir: {path} cannot be written: {reason(error)}") from None
        self._writers: list[tuple[str, LogWriter]] = []  # with the logger's name
        for logger in loggers:
            try:
                self._writers.append((logger.name, logger.open(output_dir, resumed_step)))
            except OSError as error:
                raise EnvironmentUnfitError(f"[[logger]] name = {logger.name!r}: {reason(error)}") from error

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one row to all destinations."""
        self._metrics.write(dict(row))
        self._ask_writers(lambda writer: writer.log(copy.deepcopy(dict(row))))

    def close(self) -> None:
        """The run has ended."""
        self._metrics.close()
        self._ask_writers(lambda writer: writer.close())

    def _ask_writers(self, ask: Callable[[LogWriter], None]) -> None:
        """Drop a writer that raises (its server or disk is gone), with a warning. metrics.jsonl has every row."""
        for writer in list(self._writers):
            name, one = writer
            try:
                ask(one)
            except Exception as error:
                self._writers.remove(writer)
                LOG.warning("logger %s failed and gets no more rows: %s: %s", name, type(error).__name__, error)
                LOG.info("where logger %s failed", name, exc_info=error)
