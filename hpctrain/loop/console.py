"""Rank 0's screen: lines of text, and how far the training is."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rich.console import Console as Terminal
from rich.progress import Progress, TextColumn, TimeRemainingColumn

from hpctrain.contracts.identity import Identity
from hpctrain.world.launcher_channel import LauncherChannel

_SECONDS_BETWEEN_LINES = 5.0
"""Where the output is no terminal."""
_SECONDS_BETWEEN_DRAWS = 0.2
"""On a terminal."""
_WEIGHT = 0.1
"""Of a step in the mean time of steps."""


class Console:
    """Prints on rank 0 and is silent elsewhere.

    What can't be shown (the disk of a job's output is full, the terminal or whoever read it is gone) ends no training.
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
            self.line(f"step {row['step']}/{steps}  evaluation loss {row['evaluation_loss']:.4f}")
            return
        text = (
            f"loss {row['loss']:.4f}  lr {row['lr']:.3g}  grad norm {row['grad_norm']:.3g}  "
            f"{row[f'{counts}_per_second']:,.0f} {counts}/s"
            f"{f'  {remark}' if remark else ''}{'  skipped' if row.get('skipped') else ''}"
        )
        if self._live:
            with suppress(OSError):
                self._show_bar(row["step"], steps, text)
            return
        eta = (steps - row["step"]) * self._smoothed(row["step_seconds"])
        now = time.monotonic()
        if now - self._last_line >= _SECONDS_BETWEEN_LINES or row["step"] == steps:
            self._last_line = now
            self.line(f"step {row['step']}/{steps}  {text}  ETA {duration(eta)}")

    def _smoothed(self, seconds: float) -> float:
        """A mean of the steps so far in which the latest ones weigh most, without the first one, which sets things up."""
        before, self._steps = self._step_seconds, self._steps + 1
        self._step_seconds = seconds if self._steps <= 2 else before + _WEIGHT * (seconds - before)
        return self._step_seconds

    def _show_bar(self, step: int, steps: int, text: str) -> None:
        if self._bar is None:
            columns = (TextColumn("step {task.completed}/{task.total}  {task.description}"), TimeRemainingColumn())
            # refreshed by hand: a thread that draws would take the interpreter from the loop
            self._bar = Progress(*columns, console=self._terminal, auto_refresh=False)
            self._task = self._bar.add_task("", total=steps, completed=step - 1)
            self._bar.start()
        now = time.monotonic()
        self._bar.update(self._task, completed=step, description=text)
        if now - self._last_line >= _SECONDS_BETWEEN_DRAWS or step == steps:
            self._last_line = now
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
