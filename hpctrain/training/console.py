"""Rank 0's screen: lines of text, and the progress of the training."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rich.cells import cell_len
from rich.console import Console as Terminal
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpctrain.contracts.identity import Identity
from hpctrain.ranks.prints import CLEAR_LINE, Labelled, own, put
from hpctrain.ranks.rank_channel import RankChannel
from hpctrain.training.progress import BestSoFar
from hpctrain.training.words import duration, slowest_rank

LOG = logging.getLogger("hpctrain")

_SECONDS_BETWEEN_LINES = 5.0
"""The interval of progress lines if the output is not a terminal, and in the log."""
_SECONDS_BETWEEN_DRAWS = 0.2
"""The interval of the bar's updates on a terminal."""
_WEIGHT = 0.1
"""The weight of a step in the mean step time."""
_KEPT = 3
"""The first words of a line stay while the word "elapsed" can be left out instead: loss, best and epoch."""
_NARROWEST_BAR = 8
"""Columns; parts of the line are left out until there are as many."""


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
        self._terminal = Terminal(highlight=False, force_terminal=True, file=own(sys.stdout)) if self._live else None
        self._bar = ""
        """The bar as the terminal shows it; "" if there is none."""
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
            words = _words(row, counts, remark, self._best.words(with_step=False))
            with suppress(OSError):  # rich flushes a terminal that is gone
                self._draw(row, steps, words, elapsed, eta)

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
        assert self._terminal is not None
        begin, shown, times = f"{row['step']}/{steps}", list(words), f"elapsed {elapsed}  ETA {eta}"
        width = self._terminal.width - 1  # a full line would wrap on some terminals
        while shown and sum(map(cell_len, [begin, *shown, times])) + 2 * len(shown) + 4 + _NARROWEST_BAR > width:
            if len(shown) == _KEPT and times.startswith("elapsed"):
                times = f"{elapsed}  ETA {eta}"
            else:
                shown.pop()
        told = [Text(one, style=_style(one)) for one in shown]
        line = Table.grid(padding=(0, 2, 0, 0), expand=True, pad_edge=False)
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        for _ in [*told, times]:
            line.add_column(no_wrap=True)
        bar = ProgressBar(total=steps, completed=row["step"], complete_style="green", finished_style="green")
        line.add_row(Text(begin, style="bold"), bar, *told, Text(times, style="dim"))
        with self._terminal.capture() as captured:
            self._terminal.print(line, width=width, end="")
        Labelled.bar = self._bar = captured.get().rstrip("\n")
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


def _style(words: str) -> str:
    return {"loss": "cyan", "best": "magenta", "skipped": "bold yellow"}.get(words.split()[0], "")
