"""Lines about a run, each with its importance and as wide as there is room."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich.cells import cell_len
from rich.text import Text

from hpctrain.base.errors import escaped
from hpctrain.training.progress import duration
from hpctrain_tools.runs import phrases
from hpctrain_tools.runs.room import Line, Room
from hpctrain_tools.runs.rows import Step
from hpctrain_tools.runs.sparkline import chart, scale, sparkline
from hpctrain_tools.runs.table import STYLES, ago
from hpctrain_tools.runs.watcher import Snapshot

_LONGEST_CURVE = 100
_LONGEST_BAR = 60
_NARROWEST_BAR = 5
# seconds without a row, after which a running job is said to be silent: it may hang
_SILENT = 60.0
# A job of long steps may take so many of them
_STEPS = 10

OF_LOSS = 2
"""The importance of the line of the loss."""


def header(seen: Snapshot, room: Room) -> Text:
    """The directory and the state."""
    state, name = _state(seen), escaped(str(seen.directory))
    style, job = STYLES.get(seen.standing.word, ""), seen.submission
    parts = [
        (room.end_of(name, max(8, room.width - cell_len(state) - 2)), "bold"),
        (state, f"bold {style}"),
        *([(f"({escaped(seen.standing.detail)})", style)] if seen.standing.detail else []),
        *([(f"{escaped(job.target)} job {job.id}", "")] if job and job.id else []),
        *([(f"wrote {ago(time.time() - seen.wrote)}", "dim")] if seen.wrote else []),
    ]
    return room.joined(parts)


def only_line(seen: Snapshot, room: Room) -> Text:
    """Everything about a run that has a single line."""
    step = seen.history.step
    name = escaped(str(seen.directory))
    told = [(f"step {_count(seen, step)}", ""), *phrases.loss(step)] if step else []
    needed = sum(cell_len(text) + 2 for text, _ in told) + len(_state(seen)) + 2
    name = room.end_of(name, max(8, room.width - needed))
    return room.joined([(name, "bold"), (_state(seen), STYLES.get(seen.standing.word, "")), *told])


def about(seen: Snapshot, room: Room) -> Iterator[Line]:
    """Lines in the order of the view, without the log."""
    yield Line(0, header(seen, room))
    step = seen.history.step
    if step is None:
        yield Line(1, room.joined([(_waiting(seen), "")]))
        return
    yield Line(1, _progress(seen, step, room))
    since = 0.0 if seen.wrote is None else time.time() - seen.wrote
    if seen.standing.word == "running" and since > max(_SILENT, _STEPS * (step.step_seconds or 0.0)):
        told = f"nothing written for {duration(since)}; ask its ranks: hpctrain where {escaped(str(seen.directory))}"
        yield Line(1, room.joined([(told, "bold yellow")]))
    yield Line(OF_LOSS, _curve(seen, step, room))
    optional = (
        (3, phrases.evaluation(seen, room)),
        (4, phrases.speed(seen, step)),
        (6, phrases.parts(step)),
        (5, [(step.slowest, "yellow")] if step.slowest else []),
        (5, phrases.guarded(step)),
        (7, phrases.rates(step)),
        (8, phrases.memory(step)),
        (9, phrases.checkpoint(seen, step)),
    )
    yield from (Line(importance, room.joined(parts)) for importance, parts in optional if parts)


def loss_chart(seen: Snapshot, room: Room, height: int) -> list[Text]:
    """The newest loss, and all losses in lines below it, with the lowest and the highest value of the scale."""
    cells = seen.history.losses.cells(min(_LONGEST_CURVE, room.width - 10))
    low, high = scale(cells)
    rows = list(chart(cells, height, room.ascii_only))
    labels = [f"{high:8.4g}", *[" " * 8] * (height - 2), f"{low:8.4g}"]
    drawn = [
        Text.assemble((label, "dim"), " ", (row, "cyan"), no_wrap=True, end="")
        for label, row in zip(labels, rows, strict=True)
    ]
    return [room.joined(phrases.loss(seen.history.step)), *drawn]


def log_line(text: str, room: Room) -> Text:
    """A line of the log."""
    return room.joined([(text, "dim")])


def _state(seen: Snapshot) -> str:
    return seen.standing.word


def _waiting(seen: Snapshot) -> str:
    if seen.history.unread:
        return f"reading its rows, {seen.history.unread / 2**20:.0f} MiB are left"
    if seen.standing.is_over:
        return "it ended before its first step"
    return "waiting for the first step"


def _count(seen: Snapshot, step: Step) -> str:
    last = seen.job.last_step(step)
    return f"{step.step}" if last is None else f"{step.step}/{last}"


def _progress(seen: Snapshot, step: Step, room: Room) -> Text:
    """ "step 17/40 ━━━━──── 42%  ETA 0:12" """
    last, left = seen.job.last_step(step), seen.seconds_left
    begin = f"step {_count(seen, step)}"
    end = "ended" if seen.standing.is_over else "" if left is None else f"ETA {duration(left)}"
    if seen.history.unread:
        end = "reading ..."
    if not last:
        return room.joined([(begin, "bold"), (end, "dim")])
    share = min(1.0, step.step / last)
    told = f"{share:.0%}"
    width = min(_LONGEST_BAR, room.width - sum(map(cell_len, (begin, end, told))) - 6)
    if width < _NARROWEST_BAR:
        return room.joined([(begin, "bold"), (told, ""), (end, "dim")])
    done = int(share * width)
    full, rest = ("#", "-") if room.ascii_only else ("━", "─")
    line = Text.assemble(
        (begin, "bold"), "  ", (full * done, "green"), (rest * (width - done), "dim"), no_wrap=True, end=""
    )
    return line.append(f"  {told}").append(f"  {end}", "dim")


def _curve(seen: Snapshot, step: Step, room: Room) -> Text:
    """The newest loss, and all losses as a sparkline."""
    line = room.joined(phrases.loss(step))
    cells = seen.history.losses.cells(min(_LONGEST_CURVE, room.width - line.cell_len - 2))
    return line.append(f"  {sparkline(cells, room.ascii_only)}", "cyan") if cells else line
