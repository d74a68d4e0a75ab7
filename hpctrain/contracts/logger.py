"""The slot `logger`: where the metrics go besides metrics.jsonl."""

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
        """The run begins after step `resumed_step` (0 for a new one); called on rank 0 only."""


class LogWriter(ABC):
    """A receiver of the rows of one run. A writer that raises gets no more rows, and training goes on."""

    @abstractmethod
    def log(self, row: Mapping[str, Any]) -> None:
        """Take a row of metrics.jsonl, as it is written there."""

    def close(self) -> None:
        """The run has ended."""
        return
