"""Reports a run: rank 0's screen, metrics.jsonl and the loggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.contracts.identity import Identity
from hpctrain.contracts.logger import Logger
from hpctrain.job.tables import KeepBestTable
from hpctrain.ranks.launcher_channel import LauncherChannel
from hpctrain.training.best import BestSoFar
from hpctrain.training.console import Console
from hpctrain.training.records import Records, plain_row


class Report:
    """Active on rank 0, silent on the other ranks."""

    def __init__(
        self,
        identity: Identity,
        channel: LauncherChannel,
        keep: KeepBestTable | None = None,
        begin: float | None = None,
    ) -> None:
        """keep: by which metric an evaluation is the best. begin: of the run, on time.monotonic(); None: now."""
        self._speaks = identity.rank == 0
        self._best = BestSoFar.by(keep)
        self._console = Console(identity, channel, self._best, begin)
        self._records: Records | None = None

    def open(self, output_dir: Path, loggers: Sequence[Logger], step: int) -> None:
        """Open the records for rows after `step`. Raises the errors of `Records`."""
        if self._speaks:
            self._records = Records(output_dir, loggers, step)
            self._best.resume(output_dir / "metrics.jsonl")

    def go_back(self, output_dir: Path, loggers: Sequence[Logger], step: int) -> None:
        """Drop the rows after `step`, as a resume does. Raises the errors of `Records`."""
        if self._records is not None:
            self._records.close()
        self.open(output_dir, loggers, step)

    def say(self, message: str) -> None:
        """Print a line on the screen."""
        self._console.line(message)

    def row(self, row: Mapping[str, Any], steps: int, counts: str, remark: str = "") -> None:
        """Report a row of metrics. counts: "tokens" or "samples". remark: extra text for the screen."""
        if self._records is not None:
            row = plain_row(row)
            self._records.write(row)
            self._console.progress(row, steps, counts, remark)

    def close(self) -> None:
        """The run has ended."""
        self._console.close()
        if self._records is not None:
            self._records.close()
