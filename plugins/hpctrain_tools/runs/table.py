"""The table of `hpctrain runs`, as wide as the terminal: what has no room is left out, the least important column first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from hpctrain.base.errors import escaped
from hpctrain_tools.runs.listing import RunSeen

STYLES = {"running": "green", "pending": "yellow", "failed": "red", "cancelled": "magenta", "unknown": "yellow"}
"""Colours of states."""
# columns of a run's directory, whose beginning is cut off for the rest
_NARROWEST = 8


@dataclass(frozen=True)
class _Column:
    """A column, the title first. importance: 0 for those that always stay, else the most important has 1."""

    importance: int
    cells: tuple[str, ...]
    width: int


def table(runs: Sequence[RunSeen], width: int | None) -> list[Text]:
    """Lines. width: of the terminal; None for all columns, whole."""
    columns = _columns(runs)
    while width is not None and _needed(columns) - columns[0].width + _NARROWEST > width:
        least = max(columns, key=lambda one: one.importance)
        if not least.importance:
            break
        columns.remove(least)
    first = columns[0].width if width is None else max(_NARROWEST, columns[0].width - max(0, _needed(columns) - width))
    lines = []
    for number in range(len(runs) + 1):
        line = Text(no_wrap=True, end="")
        for place, column in enumerate(columns):
            room = column.width if place else first
            text = _cut(column.cells[number], room)
            style = STYLES.get(text, "") if number and column.cells[0] == "STATE" else "" if number else "bold"
            line.append(text, style)
            line.append(" " * (room + 2 - cell_len(text)) if place < len(columns) - 1 else "")
        lines.append(line)
    return lines


def _columns(runs: Sequence[RunSeen]) -> list[_Column]:
    now = time.time()
    found: list[tuple[str, int, list[str]]] = [
        ("RUN", 0, [escaped(str(one.directory)) for one in runs]),
        ("STATE", 0, [one.standing.word for one in runs]),
        ("STEP", 1, [_steps(one) for one in runs]),
        ("LOSS", 2, [_number(one.step.loss if one.step else None) for one in runs]),
        ("EVALUATION", 4, [_evaluation(one) for one in runs]),
        ("WROTE", 3, ["-" if one.time is None else ago(now - one.time) for one in runs]),
        (
            "JOB",
            5,
            [escaped(f"{one.submission.target} {one.submission.id}") if one.submission else "-" for one in runs],
        ),
        ("CHECKPOINT", 6, [escaped(one.checkpoint.name) if one.checkpoint else "-" for one in runs]),
    ]
    made = []
    for title, importance, cells in found:
        whole = (title, *cells)
        made.append(_Column(importance, whole, max(map(cell_len, whole))))
    return made


def _needed(columns: Sequence[_Column]) -> int:
    return sum(one.width for one in columns) + 2 * (len(columns) - 1)


def _cut(text: str, room: int) -> str:
    """The end of a text that has no room."""
    while cell_len(text) > room:
        text = "…" + text[2:] if text.startswith("…") else "…" + text[1:]
    return text


def _steps(run: RunSeen) -> str:
    if run.step is None:
        return "-"
    last = run.job.last_step(run.step)
    return f"{run.step.step}" if last is None else f"{run.step.step}/{last}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _evaluation(run: RunSeen) -> str:
    """The measure by which the job keeps the best, or else the loss."""
    if run.evaluation is None:
        return "-"
    metric = run.job.keep.metric if run.job.keep else "loss"
    return _number(run.evaluation.measured.get(metric))


def ago(seconds: float) -> str:
    """ "5 min ago" """
    for unit, length, most in (("s", 1.0, 60.0), ("min", 60.0, 3600.0), ("h", 3600.0, 48 * 3600.0)):
        if seconds < most:
            return f"{max(0.0, seconds) // length:.0f} {unit} ago"
    return f"{seconds // 86400:.0f} d ago"
