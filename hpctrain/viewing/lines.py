"""Lines about a run, each with its importance and as wide as there is room."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from hpctrain.base.errors import escaped
from hpctrain.checkpoint.directory import step_of
from hpctrain.training.sparkline import chart, scale, sparkline
from hpctrain.training.words import duration
from hpctrain.viewing.rows import Step
from hpctrain.viewing.table import STYLES, ago
from hpctrain.viewing.watcher import Snapshot

_GIB = 2**30
_LONGEST_CURVE = 100
_LONGEST_BAR = 60
_NARROWEST_BAR = 5
_SILENT = 60.0
"""Seconds without a row, after which a running job is said to be silent: it may hang."""
_STEPS = 10
"""A job of long steps may take so many of them."""

OF_LOSS = 2
"""The importance of the line of the loss."""

Part: TypeAlias = tuple[str, str]
"""A text and its style."""


@dataclass(frozen=True)
class Line:
    """A line of a view. importance: 0 for the most important; what has no room is left out, the least important first."""

    importance: int
    text: Text


@dataclass(frozen=True)
class Room:
    """What a line has. ascii_only: the output has no other characters."""

    width: int
    ascii_only: bool = False

    @property
    def ellipsis(self) -> str:
        return "..." if self.ascii_only else "…"

    def joined(self, parts: Sequence[Part]) -> Text:
        """The first parts that have room, with two spaces between them; of the first as much as there is room for."""
        line = Text(no_wrap=True, end="")
        for number, (text, style) in enumerate(parts):
            left = self.width - line.cell_len - (2 if number else 0)
            if cell_len(text) > left:
                if not number:
                    line.append(set_cell_size(text, max(0, left - len(self.ellipsis))) + self.ellipsis, style)
                break
            line.append("  " if number else "")
            line.append(text, style)
        return line

    def end_of(self, text: str, width: int) -> str:
        """The end of a path that has no room."""
        if cell_len(text) <= width:
            return text
        while text and cell_len(text) + len(self.ellipsis) > width:
            text = text[1:]
        return self.ellipsis + text


def header(seen: Snapshot, room: Room) -> Text:
    """The directory and the state."""
    state, name = _state(seen), escaped(str(seen.directory))
    style = STYLES.get(seen.standing.word, "")
    parts = [
        (room.end_of(name, max(8, room.width - cell_len(state) - 2)), "bold"),
        (state, f"bold {style}"),
        *([(f"({escaped(seen.standing.detail)})", style)] if seen.standing.detail else []),
        *(
            [(f"{seen.submission.target} job {seen.submission.id}", "")]
            if seen.submission and seen.submission.id
            else []
        ),
        *([(f"wrote {ago(time.time() - seen.wrote)}", "dim")] if seen.wrote else []),
    ]
    return room.joined(parts)


def only_line(seen: Snapshot, room: Room) -> Text:
    """Everything about a run that has a single line."""
    step = seen.history.step
    name = escaped(str(seen.directory))
    told = [(f"step {_count(seen, step)}", ""), *_loss(step)] if step else []
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
    since = None if seen.wrote is None else time.time() - seen.wrote
    if (
        seen.standing.word == "running"
        and since is not None
        and since > max(_SILENT, _STEPS * (step.step_seconds or 0))
    ):
        told = f"nothing written for {duration(since)}; ask its ranks: hpctrain where {escaped(str(seen.directory))}"
        yield Line(1, room.joined([(told, "bold yellow")]))
    yield Line(OF_LOSS, _curve(seen, step, room))
    optional = (
        (3, _evaluation(seen, room)),
        (4, _speed(seen, step)),
        (6, _parts(step)),
        (5, [(step.slowest, "yellow")] if step.slowest else []),
        (5, _guarded(step)),
        (7, _rates(step)),
        (8, _memory(step)),
        (9, _checkpoint(seen, step)),
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
    return [room.joined(_loss(seen.history.step)), *drawn]


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
    line = room.joined(_loss(step))
    cells = seen.history.losses.cells(min(_LONGEST_CURVE, room.width - line.cell_len - 2))
    return line.append(f"  {sparkline(cells, room.ascii_only)}", "cyan") if cells else line


def _loss(step: Step | None) -> list[Part]:
    """The loss, which may not be finite."""
    if step is None:
        return []
    return [(f"loss {step.loss:.4f}", "bold cyan") if step.loss is not None else ("loss not finite", "bold red")]


def _evaluation(seen: Snapshot, room: Room) -> list[Part]:
    """The newest evaluation and the best so far, with their steps if there is room."""
    found = seen.history.evaluation
    if found is None:
        return []
    first = escaped(seen.job.keep.metric if seen.job.keep else "loss")
    told = {escaped(name): "not finite" if value is None else f"{value:.4f}" for name, value in found.measured.items()}
    begin = f"evaluation {'' if first == 'loss' else first + ' '}{told.pop(first, '-')}"
    parts: list[Part] = []
    for newest, best in ((True, True), (False, True), (False, False)):
        words = [f"{begin} (step {found.step})" if newest else begin, *map(escaped, seen.history.best.words(best))]
        parts = [(one, "magenta" * (number > 0)) for number, one in enumerate(words)]
        if sum(cell_len(one) for one in words) + 2 * len(words) - 2 <= room.width:
            break
    return [*parts, *((f"{name} {value}", "") for name, value in told.items())]


def _speed(seen: Snapshot, step: Step) -> list[Part]:
    each = seen.history.step_seconds
    return [
        *([(f"{step.per_second:,.0f} {step.counts}/s", "")] if step.per_second is not None else []),
        *(
            [(f"{each:.3g} s a step" if each >= 0.1 else f"{1000 * each:.3g} ms a step", "")]
            if each is not None
            else []
        ),
        *([(f"mfu {step.mfu:.1%}", "")] if step.mfu is not None else []),
        *([(f"{step.flops / 1e12:,.3g} TFLOP/s", "")] if step.flops is not None else []),
    ]


def _parts(step: Step) -> list[Part]:
    """The parts of the step's time, the largest first."""
    if not step.parts or not step.step_seconds:
        return []
    shares = {name: seconds / step.step_seconds for name, seconds in step.parts.items()}
    rest = 1.0 - sum(shares.values())
    if rest > 0:
        shares["other" if "forward" in shares else "computing"] = rest
    largest = sorted(shares.items(), key=lambda one: -one[1])
    (name, share), *others = largest
    return [(f"time: {name} {share:.0%}", ""), *((f"{name} {share:.0%}", "") for name, share in others)]


def _rates(step: Step) -> list[Part]:
    return [
        *([(f"lr {step.lr:.3g}", "")] if step.lr is not None else []),
        (f"grad norm {step.grad_norm:.3g}", "") if step.grad_norm is not None else ("grad norm not finite", "red"),
        *([(f"epoch {step.epoch:.2f}", "")] if step.epoch is not None else []),
    ]


def _guarded(step: Step) -> list[Part]:
    """Steps that guards left out."""
    return [
        *([("step skipped", "bold yellow")] if step.skipped else []),
        *([(f"{step.skipped_steps} steps skipped", "yellow")] if step.skipped_steps else []),
        *([(f"{step.rollbacks} rollbacks", "yellow")] if step.rollbacks else []),
    ]


def _memory(step: Step) -> list[Part]:
    if step.memory_max is None:
        return []
    mean = "" if step.memory_mean is None else f", mean {step.memory_mean / _GIB:.2f} GiB"
    return [(f"memory max {step.memory_max / _GIB:.2f} GiB{mean}", "")]


def _checkpoint(seen: Snapshot, step: Step) -> list[Part]:
    if seen.checkpoint is None:
        return [("no checkpoint", "dim")]
    since = step.step - step_of(seen.checkpoint)
    return [(f"checkpoint {seen.checkpoint.name}", ""), *([(f"{since} steps ago", "dim")] if since > 0 else [])]
