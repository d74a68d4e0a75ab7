"""What a person sees on rank 0: the resolved layout, a progress line, and where the results lie."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rich.console import Console as Terminal
from rich.progress import Progress, TextColumn, TimeRemainingColumn

from hpctrain.world.front import Front
from hpctrain.world.identity import Identity
from hpctrain.world.meeting import threads_per_rank

if TYPE_CHECKING:
    from hpctrain.loop.session import Session

_SECONDS_BETWEEN_LINES = 5.0
"""Where the output is no terminal."""
_SECONDS_BETWEEN_DRAWS = 0.2
"""On a terminal."""


class Console:
    """Prints on rank 0 and is silent elsewhere.

    What can't be shown (the disk of a job's output is full, the terminal or whoever read it is gone) ends no training.
    """

    def __init__(self, identity: Identity, front: Front) -> None:
        self._speaks, self._live = identity.rank == 0, front.terminal
        self._terminal = Terminal(highlight=False, soft_wrap=True, force_terminal=self._live)
        self._bar: Progress | None = None
        self._last_line = -_SECONDS_BETWEEN_LINES

    def line(self, text: str) -> None:
        """One line of plain text."""
        if not self._speaks:
            return
        with suppress(OSError):
            if self._bar is None:
                print(text, flush=True)
            else:
                self._terminal.print(text, markup=False)

    def layout(self, session: Session) -> None:
        """Everything that was derived from the job, once."""
        for name, value in describe(session).items():
            self.line(f"{name:<12} {value}")
        if session.step:
            self.line(f"resuming     from step {session.step} ({session.saving.newest})")

    def progress(self, row: Mapping[str, Any], steps: int, counts: str) -> None:
        """A bar on a terminal, a plain line every few seconds elsewhere. counts: "tokens" or "samples"."""
        if "evaluation_loss" in row:
            self.line(f"step {row['step']}/{steps}  evaluation loss {row['evaluation_loss']:.4f}")
            return
        bubble = f"  bubble {row['pipeline_bubble']:.0%}" if "pipeline_bubble" in row else ""
        text = (
            f"loss {row['loss']:.4f}  lr {row['lr']:.3g}  grad norm {row['grad_norm']:.3g}  "
            f"{row[f'{counts}_per_second']:,.0f} {counts}/s{bubble}{'  skipped' if row.get('skipped') else ''}"
        )
        if self._live:
            with suppress(OSError):
                self._show_bar(row["step"], steps, text)
            return
        now = time.monotonic()
        if now - self._last_line >= _SECONDS_BETWEEN_LINES or row["step"] == steps:
            self._last_line = now
            eta = (steps - row["step"]) * row["step_seconds"]
            self.line(f"step {row['step']}/{steps}  {text}  ETA {duration(eta)}")

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


def describe(session: Session) -> dict[str, str]:
    """The resolved job in a few lines."""
    job, parts, identity, plan = session.job, session.parts, session.world.identity, session.plan
    everything, trained = session.elements, session.trained_elements
    pipeline = session.runner.describe(plan.micro_batches)
    left = max(0, session.steps - session.step) * plan.samples_per_step
    epochs = (session.samples_seen + left) / len(session.training)
    compression = session.sums.describe()
    threads = threads_per_rank(identity)
    chosen = (parts.model, parts.dataset, parts.optimizer, parts.schedule)
    return {
        "job": f"{job.job.name}, seed {job.job.seed}, {session.steps} steps, files in {job.output_dir}",
        "ranks": f"{identity.size} ({identity.source}), {identity.local_size} per node, "
        f"{threads} thread{'s' if threads > 1 else ''} each, on {session.device.type}",
        "mesh": f"{session.layout}; sharding stage {parts.sharding.name}",
        **({"pipeline": pipeline} if pipeline else {}),
        "batch": str(plan),
        "data": f"{len(session.training):,} samples, {epochs:.2f} epochs",
        "parameters": f"{everything:,}" + (f", {trained:,} trained" if trained != everything else ""),
        "precision": parts.precision.describe(session.device),
        **({"compression": compression} if compression else {}),
        "plugins": ", ".join(plugin.name for plugin in chosen)
        + f", {parts.checkpoint.name} checkpoints, {parts.communicator.name} communicator",
    }


def duration(seconds: float) -> str:
    """ "1:02:03" """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
