"""Rank 0's screen: lines of text, and the progress of the training."""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.contracts.identity import Identity
from hpctrain.ranks.prints import CLEAR_LINE, Labelled, own, put
from hpctrain.ranks.rank_channel import RankChannel
from hpctrain.training.progress import BestSoFar, duration, slowest_rank

LOG = logging.getLogger("hpctrain")

# the interval of progress lines if the output is not a terminal, and in the log
_SECONDS_BETWEEN_LINES = 5.0
# the interval of the bar's updates on a terminal
_SECONDS_BETWEEN_DRAWS = 0.2
# the weight of a step in the mean step time
_WEIGHT = 0.1
# columns; parts of the line are left out until there are as many
_NARROWEST_BAR = 8


class Console:
    """Prints on rank 0 and is silent elsewhere. Rank 0's log gets a copy.

    A failed write (the disk of the job's output is full, the terminal or the reader is gone) does not end the training.
    """

    def __init__(
        self, identity: Identity, channel: RankChannel, best: BestSoFar | None = None, begin: float | None = None
    ) -> None:
        """begin: of the run, on time.monotonic(); None: now."""
        self._speaks, self._live = identity.rank == 0, channel.terminal
        self._begin = time.monotonic() if begin is None else begin
        self._best = best or BestSoFar()
        # the bar as the terminal shows it; "" if there is none
        self._bar = ""
        self._last_line = self._last_draw = -_SECONDS_BETWEEN_LINES
        self._step_seconds, self._steps = 0.0, 0

    def line(self, text: str) -> None:
        """Print a line of plain text."""
        if self._speaks:
            LOG.info("%s", text)
            put(f"{CLEAR_LINE}{text}\n{self._bar}" if self._bar else f"{text}\n", own(sys.stdout))

    def progress(self, row: Mapping[str, Any], steps: int, counts: str, remark: str) -> None:
        """A bar on a terminal, a plain line every few seconds elsewhere. counts: "tokens" or "samples"."""
        if "evaluation_loss" in row:
            self._tell_evaluation(row, steps, counts)
            return
        eta = duration((steps - row["step"]) * self._smoothed(row["step_seconds"]))
        now, last = time.monotonic(), row["step"] == steps
        elapsed = duration(now - self._begin)
        if last or now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            found = [f"step {row['step']}/{steps}", *_words(row, counts, remark, self._best.words())]
            text = "  ".join([*found, f"elapsed {elapsed}", f"ETA {eta}"])
            if self._live:
                LOG.info("%s", text)
            else:
                self.line(text)
        if self._live and (last or now - self._last_draw >= _SECONDS_BETWEEN_DRAWS):
            self._last_draw = now
            self._draw(row, steps, _words(row, counts, remark, self._best.words(with_step=False)), elapsed, eta)

    def _tell_evaluation(self, row: Mapping[str, Any], steps: int, counts: str) -> None:
        told = {
            name.removeprefix("evaluation_"): value for name, value in row.items() if name.startswith("evaluation_")
        }
        numbers = {name: value for name, value in told.items() if isinstance(value, (int, float)) and name != counts}
        shown = "  ".join(f"{name} {value:.4f}" for name, value in numbers.items())
        self._best.see(row)
        self.line("  ".join([f"step {row['step']}/{steps}  evaluation {shown}", *self._best.words()]))

    def _smoothed(self, seconds: float) -> float:
        """The mean step time so far, with most weight on the latest steps and without the first, which includes setup."""
        before, self._steps = self._step_seconds, self._steps + 1
        self._step_seconds = seconds if self._steps <= 2 else before + _WEIGHT * (seconds - before)
        return self._step_seconds

    def _draw(self, row: Mapping[str, Any], steps: int, words: Sequence[str], elapsed: str, eta: str) -> None:
        """Draw one line in place of the last bar; what has no room is left out, the last words first."""
        begin, shown, times = f"{row['step']}/{steps}", list(words), f"{elapsed}  ETA {eta}"
        width = shutil.get_terminal_size().columns - 1  # a full line would wrap on some terminals
        while shown and len("  ".join([begin, *shown, times])) + 2 + _NARROWEST_BAR > width:
            shown.pop()
        room = max(0, width - len("  ".join([begin, *shown, times])) - 2)
        done = room * row["step"] // steps
        bar = "=" * done
        line = "  ".join([begin, f"{bar:<{room}}", *shown, times])
        Labelled.bar = self._bar = line
        put(CLEAR_LINE + self._bar, own(sys.stdout))

    def close(self) -> None:
        """Leave the last state of the bar on the screen."""
        if self._bar:
            put("\n", own(sys.stdout))
        Labelled.bar = self._bar = ""


def _words(row: Mapping[str, Any], counts: str, remark: str, best: Sequence[str]) -> list[str]:
    """The words about a step's row, the most important first."""
    has_data = row.get(counts) != 0  # a program's loop may have none
    return [
        f"loss {row['loss']:.4f}",
        *(["skipped"] if row.get("skipped") else []),
        *best,
        *([f"epoch {row['epoch']:.2f}"] if "epoch" in row and has_data else []),
        *([f"{row[f'{counts}_per_second']:,.0f} {counts}/s"] if has_data else []),
        f"lr {row['lr']:.3g}",
        f"grad norm {row['grad_norm']:.3g}",
        *([remark] if remark else []),
        *([slowest] if (slowest := slowest_rank(row)) else []),
    ]
