"""What people see of a run: rank 0's screen, metrics.jsonl and the loggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.contracts.identity import Identity
from hpctrain.contracts.logger import Logger
from hpctrain.loop.console import Console
from hpctrain.loop.records import Records
from hpctrain.world.launcher_channel import LauncherChannel


class Report:
    """Speaks on rank 0, and is silent on the others."""

    def __init__(self, identity: Identity, channel: LauncherChannel) -> None:
        self._speaks = identity.rank == 0
        self._console = Console(identity, channel)
        self._records: Records | None = None

    def open(self, output_dir: Path, loggers: Sequence[Logger], step: int) -> None:
        """Rows follow, from `step` on. Raises what `Records` does."""
        if self._speaks:
            self._records = Records(output_dir, loggers, step)

    def say(self, message: str) -> None:
        """A line on the screen."""
        self._console.line(message)

    def row(self, row: Mapping[str, Any], steps: int, counts: str, remark: str = "") -> None:
        """A row of metrics, to all. counts: "tokens" or "samples". remark: what else the screen shows."""
        if self._records is not None:
            self._records.write(row)
            self._console.progress(row, steps, counts, remark)

    def close(self) -> None:
        """The run has ended."""
        self._console.close()
        if self._records is not None:
            self._records.close()
