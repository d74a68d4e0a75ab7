"""The slot `logger`: further places for the metrics, besides metrics.jsonl."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.contracts.plugin import Plugin


class Logger(Plugin):
    """A place for metrics."""

    @abstractmethod
    def open(self, output_dir: Path, resumed_step: int) -> LogWriter:
        """Open the log of a run that begins after step `resumed_step`, 0 for a new run. Called on rank 0 only."""


class LogWriter(ABC):
    """The log of one run. A writer that raises gets no more rows, and training goes on."""

    @abstractmethod
    def log(self, row: Mapping[str, Any]) -> None:
        """Log a row, as it is written into metrics.jsonl."""

    def close(self) -> None:
        """The run has ended."""
        return
