"""The rows of a run as far as a view needs them, in bounded memory, however many there are."""

from __future__ import annotations

import statistics
from collections import deque
from pathlib import Path

from hpctrain.job.tables import KeepBestTable
from hpctrain.training.progress import BestSoFar
from hpctrain_tools.runs.following import PART_BYTES, Follower, Part
from hpctrain_tools.runs.rows import Evaluation, Step, is_evaluation, read_row
from hpctrain_tools.runs.sparkline import Series

# rows of steps that are read of a part; of more, every so-manyth. Lines cost little, JSON much.
_EACH = 500
# steps of which the time of a step is a median
_RECENT = 20


class History:
    """Follows metrics.jsonl. A file that is replaced, by a resume for instance, begins anew."""

    def __init__(self, path: Path, keep: KeepBestTable | None = None, part_bytes: int = PART_BYTES) -> None:
        """keep: by which metric an evaluation is the best."""
        self._follower, self._keep = Follower(path, part_bytes), keep
        self.unread = 0
        """Bytes of the file that are still to be read."""
        self._begin()

    def _begin(self) -> None:
        self.step: Step | None = None
        self.evaluation: Evaluation | None = None
        self.best = BestSoFar.by(self._keep)
        self.losses = Series()
        self._seconds = deque[float](maxlen=_RECENT)

    def read(self) -> None:
        """Read a part of what is new. Raises OSError if the file can't be read."""
        part = self._follower.look()
        self.unread = part.left
        if part.anew:
            self._begin()
        self._take(part)

    def _take(self, part: Part) -> None:
        every, recent = max(1, len(part.lines) // _EACH), len(part.lines) - _RECENT
        for number, line in enumerate(part.lines):
            if number % every and number < recent and not is_evaluation(line):
                continue
            row = read_row(line)
            if isinstance(row, Step):
                self.step = row
                self.losses.add(row.step, row.loss)
                if row.step_seconds is not None:
                    self._seconds.append(row.step_seconds)
            elif row is not None:
                self.evaluation = row
                self.best.see(row.row)

    @property
    def step_seconds(self) -> float | None:
        """The median of the newest steps: a checkpoint or an evaluation holds one up now and then."""
        return statistics.median(self._seconds) if self._seconds else None
