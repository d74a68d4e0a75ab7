"""Figures of a run in words, the most important of each line first."""

from __future__ import annotations

from rich.cells import cell_len

from hpctrain.base.errors import escaped
from hpctrain.checkpoint.directory import step_of
from hpctrain_tools.runs.room import Part, Room
from hpctrain_tools.runs.rows import Step
from hpctrain_tools.runs.watcher import Snapshot

_GIB = 2**30
# the share of the time from which on a part is shown
_SEEN = 0.005


def loss(step: Step | None) -> list[Part]:
    """The loss, which may not be finite."""
    if step is None:
        return []
    return [(f"loss {step.loss:.4f}", "bold cyan") if step.loss is not None else ("loss not finite", "bold red")]


def evaluation(seen: Snapshot, room: Room) -> list[Part]:
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


def speed(seen: Snapshot, step: Step) -> list[Part]:
    """Throughput, time and use of the hardware."""
    each = seen.history.step_seconds
    return [
        *([(f"{step.per_second:,.0f} {step.counts}/s", "")] if step.per_second is not None else []),
        *([] if each is None else [(f"{each:.3g} s a step" if each >= 0.1 else f"{1000 * each:.3g} ms a step", "")]),
        *([(f"mfu {step.mfu:.1%}", "")] if step.mfu is not None else []),
        *([(f"goodput {step.goodput:.0%}", "")] if step.goodput is not None else []),
        *([(f"{step.flops / 1e12:,.3g} TFLOP/s", "")] if step.flops is not None else []),
    ]


def parts(step: Step) -> list[Part]:
    """The parts of the time since the step before, the largest first."""
    whole = sum(step.parts.values())
    if whole <= 0:
        return []
    largest = sorted(step.parts.items(), key=lambda one: -one[1])
    shares = [f"{escaped(name)} {seconds / whole:.0%}" for name, seconds in largest if seconds >= _SEEN * whole]
    return [(f"time: {shares[0]}", ""), *((share, "") for share in shares[1:])]


def rates(step: Step) -> list[Part]:
    """Learning rate, norm of the gradient, epoch."""
    return [
        *([(f"lr {step.lr:.3g}", "")] if step.lr is not None else []),
        (f"grad norm {step.grad_norm:.3g}", "") if step.grad_norm is not None else ("grad norm not finite", "red"),
        *([(f"epoch {step.epoch:.2f}", "")] if step.epoch is not None else []),
    ]


def guarded(step: Step) -> list[Part]:
    """Steps that guards left out."""
    return [
        *([("step skipped", "bold yellow")] if step.skipped else []),
        *([(f"skipped steps: {step.skipped_steps}", "yellow")] if step.skipped_steps else []),
        *([(f"rollbacks: {step.rollbacks}", "yellow")] if step.rollbacks else []),
    ]


def memory(step: Step) -> list[Part]:
    """Peaks of the ranks."""
    if step.memory_max is None:
        return []
    mean = "" if step.memory_mean is None else f", mean {step.memory_mean / _GIB:.2f} GiB"
    return [(f"memory max {step.memory_max / _GIB:.2f} GiB{mean}", "")]


def checkpoint(seen: Snapshot, step: Step) -> list[Part]:
    """The newest checkpoint."""
    if seen.checkpoint is None:
        return [("no checkpoint", "dim")]
    since = step.step - step_of(seen.checkpoint)
    return [(f"checkpoint {seen.checkpoint.name}", ""), *([(f"{since} steps ago", "dim")] if since > 0 else [])]
