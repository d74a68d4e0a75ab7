"""Where rows of metrics go besides the screen: metrics.jsonl, and the loggers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.contracts.logger import Logger
from hpctrain.errors import EnvironmentUnfitError, UsageError, reason
from hpctrain.loop.metrics import MetricsFile

LOG = logging.getLogger("hpctrain")


class Records:
    """Of a run, on rank 0."""

    def __init__(self, output_dir: Path, loggers: Sequence[Logger], resumed_step: int) -> None:
        """Raises UsageError where metrics.jsonl can't be written, EnvironmentUnfitError where a logger's files can't."""
        path = output_dir / "metrics.jsonl"
        try:
            self._metrics = MetricsFile(path, resumed_step)
        except OSError as error:
            raise UsageError(f"[job] output_dir: {path} cannot be written: {reason(error)}") from None
        for logger in loggers:
            try:
                logger.open(output_dir, resumed_step)
            except OSError as error:
                raise EnvironmentUnfitError(f"[[logger]] name = {logger.name!r}: {reason(error)}") from error
        self._loggers = list(loggers)

    def write(self, row: Mapping[str, Any]) -> None:
        """One row, to all."""
        self._metrics.write(dict(row))
        self._ask_loggers(lambda logger: logger.log(row))

    def close(self) -> None:
        """The run has ended."""
        self._metrics.close()
        self._ask_loggers(lambda logger: logger.close())

    def _ask_loggers(self, ask: Callable[[Logger], None]) -> None:
        """One that fails (its server or its disk is gone) is done without from then on: metrics.jsonl has every row."""
        for logger in list(self._loggers):
            try:
                ask(logger)
            except Exception as error:
                self._loggers.remove(logger)
                LOG.warning("logger %s failed and gets no more rows: %s: %s", logger.name, type(error).__name__, error)
                LOG.info("where logger %s failed", logger.name, exc_info=error)
