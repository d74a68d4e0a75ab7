"""Rank 0's screen: lines of text, and the progress of the training."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rich.console import Console as Terminal
from rich.progress import Progress, TextColumn
from rich.table import Column

from hpctrain.contracts.identity import Identity
from hpctrain.world.launcher_channel import LauncherChannel

_SECONDS_BETWEEN_LINES = 5.0
"""Between progress lines if the output is not a terminal."""
_SECONDS_BETWEEN_DRAWS = 0.2
"""Between updates of the bar on a terminal."""
_WEIGHT = 0.1
"""The weight of a step in the mean step time."""


class Console:
    """Prints on rank 0 and is silent elsewhere.

    A failed write (the disk of the job's output is full, the terminal or the reader is gone) does not end the training.
    """

    def __init__(self, identity: Identity, channel: LauncherChannel) -> None:
        self._speaks, self._live = identity.rank == 0, channel.terminal
        self._terminal = Terminal(highlight=False, soft_wrap=True, force_terminal=self._live)
        self._bar: Progress | None = None
        self._last_line = -_SECONDS_BETWEEN_LINES
        self._step_seconds, self._steps = 0.0, 0

    def line(self, text: str) -> None:
        """One line of plain text."""
        if not self._speaks:
            return
        with suppress(OSError):
            if self._bar is None:
                print(text, flush=True)
            else:
                self._terminal.print(text, markup=False)

    def progress(self, row: Mapping[str, Any], steps: int, counts: str, remark: str) -> None:
        """A bar on a terminal, a plain line every few seconds elsewhere. counts: "tokens" or "samples"."""
        if "evaluation_loss" in row:
            told = {
                name.removeprefix("evaluation_"): value for name, value in row.items() if name.startswith("evaluation_")
            }
            shown = "  ".join(f"{name} {value:.4f}" for name, value in told.items() if name != counts)
            self.line(f"step {row['step']}/{steps}  evaluation {shown}")
            return
        eta = (steps - row["step"]) * self._smoothed(row["step_seconds"])
        text = (
            f"step {row['step']}/{steps}  loss {row['loss']:.4f}  lr {row['lr']:.3g}  grad norm {row['grad_norm']:.3g}  "
            f"{row[f'{counts}_per_second']:,.0f} {counts}/s"
            f"{f'  {remark}' if remark else ''}{'  skipped' if row.get('skipped') else ''}  ETA {duration(eta)}"
        )
        between = _SECONDS_BETWEEN_DRAWS if self._live else _SECONDS_BETWEEN_LINES
        now = time.monotonic()
        if now - self._last_line < between and row["step"] != steps:
            return
        self._last_line = now
        if self._live:
            with suppress(OSError):
                self._show_bar(text)
        else:
            self.line(text)

    def _smoothed(self, seconds: float) -> float:
        """The mean step time so far, with most weight on the latest steps and without the first, which includes setup."""
        before, self._steps = self._step_seconds, self._steps + 1
        self._step_seconds = seconds if self._steps <= 2 else before + _WEIGHT * (seconds - before)
        return self._step_seconds

    def _show_bar(self, text: str) -> None:
        """Draw `text` in place of the last one; it wraps on a narrow terminal."""
        if self._bar is None:
            column = TextColumn("{task.description}", markup=False, table_column=Column())
            # refreshed by hand: a drawing thread would take the GIL from the loop
            self._bar = Progress(column, console=self._terminal, auto_refresh=False)
            self._task = self._bar.add_task(text)
            self._bar.start()
        self._bar.update(self._task, description=text)
        self._bar.refresh()

    def close(self) -> None:
        """Leave the last state of the bar on the screen."""
        if self._bar is not None:
            with suppress(OSError):
                self._bar.stop()
            self._bar = None


def duration(seconds: float) -> str:
    """ "1:02:03" """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
