"""The sections of a report as texts and tables, which each format writes in its way. Texts are as the files have them: whoever
writes them escapes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone

from hpctrain_tools.report.against_plan import against, told_plan
from hpctrain_tools.report.curves import PARTS, mean_of
from hpctrain_tools.report.facts import Facts, flat
from hpctrain_tools.report.gathering import counted
from hpctrain_tools.report.section import Section
from hpctrain_tools.report.wall_time import KINDS

# rows of a table
_MOST = 40
_LONGEST = 400
_GIB = 2**30


def sections_of(facts: Facts) -> list[Section]:
    """All sections with something to tell."""
    return [one for make in _MAKERS if not (one := make(facts)).is_empty]


def where(facts: Facts) -> Section:
    """Hosts, ranks, versions and the command of the newest start."""
    if not facts.starts.starts:
        return Section("What ran where")
    start = facts.starts.starts[-1]
    versions = ", ".join(f"{name} {version}" for name, version in start.versions.items())
    commit = f"{start.commit[:12]}{', changed' if start.is_changed else ''}"
    submitted = f"{facts.scheduler[0]} {facts.scheduler[1]}" if facts.scheduler else ""
    told = {
        "Command": start.command, "In": start.directory, "Job": submitted, "Git": commit if start.commit else "",
        "Ranks": f"{counted(start)} ({start.launcher})",
        "Device": start.device + (f", {start.device_bytes / 1e9:.3g} GB" if start.device_bytes else ""),
        "Mesh": facts.described.get("mesh", ""), "Batch": facts.described.get("batch", ""),
        "Parameters": facts.described.get("parameters", ""), "Precision": facts.described.get("precision", ""),
        "Versions": versions, "Plugins": ", ".join(start.plugins),
    }  # fmt: skip
    return Section("What ran where", rows=[(name, _cut(value)) for name, value in told.items() if value])


def loss(facts: Facts) -> Section:
    """Loss, evaluations and the learning rate."""
    newest, rows = facts.rows.newest, facts.rows
    if newest is None:
        return Section("Loss and learning rate")
    told = [f"loss {_number(newest.loss)} at step {newest.step}"]
    if rows.lowest is not None:
        told.append(f"lowest {rows.lowest[1]:.4g} at step {rows.lowest[0]}")
    if rows.evaluations:
        measured = ", ".join(
            f"{name} {_number(value)}" for name, value in list(rows.evaluations[-1].measured.items())[:8]
        )
        told.append(_cut(f"newest evaluation, step {rows.evaluations[-1].step}: {measured}"))
        told += [f"best evaluation: loss {rows.best[1]:.4g} at step {rows.best[0]}"] if rows.best is not None else []
    if rows.not_finite:
        told.append(f"not finite in {rows.not_finite} steps")
    return Section("Loss and learning rate", ["; ".join(told)], plots=["loss", "lr"])


def speed(facts: Facts) -> Section:
    """Throughput and the use of the hardware."""
    newest, points = facts.rows.newest, facts.rows.points
    if newest is None or newest.per_second is None:
        return Section("Throughput")
    mean = mean_of(points, "per_second")
    told = []
    if mean is not None:
        told.append(
            f"{mean:,.0f} {newest.counts}/s on average" if mean >= 1000 else f"{mean:.4g} {newest.counts}/s on average"
        )
    if facts.step_seconds is not None:
        told.append(f"{_seconds(facts.step_seconds)} a step")
    mfu = mean_of(points, "mfu")
    told += [f"mfu {mfu:.1%}"] if mfu is not None else []
    told += [f"{newest.flops / 1e12:,.3g} TFLOP/s"] if newest.flops is not None else []
    return Section("Throughput", ["; ".join(told)], plots=["throughput", *(["mfu"] if mfu is not None else [])])


def step_time(facts: Facts) -> Section:
    """The parts of a step's time."""
    steps = facts.rows.steady_steps
    steady = {part: seconds for part, seconds in facts.rows.steady.items() if part not in ("evaluation", "checkpoint")}
    whole = sum(steady.values())
    if not steps or whole <= 0:
        return Section("Where a step's time goes")
    rows = [
        (part, _seconds(steady[part] / steps), f"{steady[part] / whole:.1%}")
        for part in sorted(PARTS, key=lambda part: -steady.get(part, 0.0))
        if steady.get(part, 0.0) > 0
    ]
    first = "The first step of each start is left out, and so are evaluations and saves."
    return Section("Where a step's time goes", [first], ("part", "a step", "share"), rows, ["parts"])


def memory(facts: Facts) -> Section:
    """Peaks of the ranks."""
    peak = facts.rows.memory_peak
    if peak is None:
        return Section("Memory of a rank")
    whole = facts.device_bytes
    told = f"peak of the largest rank {peak / _GIB:.2f} GiB"
    told += f", {peak / whole:.0%} of {whole / _GIB:.1f} GiB" if whole else ""
    mean = mean_of(facts.rows.points, "memory_mean")
    told += f"; mean over the ranks {mean / _GIB:.2f} GiB" if mean is not None else ""
    return Section("Memory of a rank", [told], plots=["memory"])


def communication(facts: Facts) -> Section:
    """Rank 0's communication by axis."""
    rows = facts.rows
    names = sorted({*rows.exposed, *rows.hidden}, key=lambda name: -rows.exposed.get(name, 0.0))[:_MOST]
    if not names or not rows.weight:
        return Section("Communication by axis")
    table = []
    for name in names:
        rate = rows.bandwidth[name].mean(name) if name in rows.bandwidth else None
        waited, hidden = rows.exposed.get(name, 0.0) / rows.weight, rows.hidden.get(name, 0.0) / rows.weight
        table.append(
            (_cut(name), _seconds(waited), _seconds(hidden), f"{rate / 1e9:.3g} GB/s" if rate is not None else "-")
        )
    return Section(
        "Communication by axis",
        ["Rank 0's, a step. Waited is what computing does not hide."],
        ("axis and operation", "waited", "hidden", "bandwidth"),
        table,
        ["communication"],
    )


def goodput(facts: Facts) -> Section:
    """The wall time by kind."""
    wall = facts.wall
    if wall is None or wall.seconds <= 0:
        return Section("Goodput")
    told = f"{wall.share('stepping'):.0%} of {duration(wall.seconds)} since the first start went into steps that count"
    told += f"; {wall.starts} starts" if wall.starts > 1 else ""
    table = [(kind, duration(wall.of[kind]), f"{wall.share(kind):.1%}") for kind in KINDS if wall.of[kind] > 0]
    table.append(("all", duration(wall.seconds), "100%"))
    return Section("Goodput", [told], ("time", "seconds or h:mm:ss", "share"), table, ["goodput"])


def checkpoints(facts: Facts) -> Section:
    """The checkpoints on disk."""
    found = facts.checkpoints[-_MOST:]
    rows = [(str(step), clock(time, facts.offset)) for step, time in reversed(found)]
    more = len(facts.checkpoints) - len(found)
    return Section("Checkpoints", [f"and {more} older ones"] if more else [], ("step", "saved"), rows)


def events(facts: Facts) -> Section:
    """Restarts, losses, skipped steps, stragglers, warnings."""
    rows = [(clock(one.time, facts.offset), _cut(one.kind), _cut(one.text)) for one in facts.events[-_MOST:]]
    told = []
    if facts.rows.skipped:
        told.append(f"steps left out: {', '.join(map(str, facts.rows.skipped[:20]))}")
    newest = facts.rows.newest
    if newest is not None and newest.rollbacks:
        told.append(f"rollbacks in the newest start: {newest.rollbacks}")
    ranked = sorted(facts.rows.stragglers.items(), key=lambda one: -one[1][1])[:5]
    for (rank, node, cause), (steps, seconds) in ranked:
        told.append(_cut(f"slow: rank {rank} on {node}, {cause}: {seconds:.3g} s over {steps:.0f} steps"))
    return Section("Events", told, ("time", "kind", "what"), rows)


def log(facts: Facts) -> Section:
    """The end of rank 0's log."""
    return Section("The end of rank 0's log", log=[_cut(line) for line in facts.last_lines])


def compared(runs: Sequence[Facts]) -> Section:
    """Differences of jobs and results of several runs."""
    jobs = [dict(flat(one.tables, _LONGEST)) for one in runs]
    keys = [key for key in dict.fromkeys(key for job in jobs for key in job) if len({job.get(key) for job in jobs}) > 1]
    rows = [(_cut(key), *(_cut(job.get(key, "-")) for job in jobs)) for key in keys[:_MOST]]
    told = [f"and {len(keys) - _MOST} more keys differ"] if len(keys) > _MOST else []
    results: dict[str, Callable[[Facts], str]] = {
        "steps": lambda one: str(one.rows.newest.step) if one.rows.newest else "-",
        "loss": lambda one: _number(one.rows.newest.loss) if one.rows.newest else "-",
        "lowest loss": lambda one: f"{one.rows.lowest[1]:.4g}" if one.rows.lowest else "-",
        "newest evaluation": lambda one: _measured(one.rows.losses[-1:]),
        "best evaluation": lambda one: _measured([one.rows.best] if one.rows.best else []),
        "seconds a step": lambda one: _seconds(one.step_seconds) if one.step_seconds else "-",
        "units a second": lambda one: _rate(mean_of(one.rows.points, "per_second")),
        "mfu": lambda one: "-" if (mfu := mean_of(one.rows.points, "mfu")) is None else f"{mfu:.1%}",
        "peak memory": lambda one: f"{one.rows.memory_peak / _GIB:.2f} GiB" if one.rows.memory_peak else "-",
        "peak to plan": _to_plan,
        "goodput": lambda one: f"{one.wall.share('stepping'):.0%}" if one.wall else "-",
        "wall time": lambda one: duration(one.wall.seconds) if one.wall else "-",
    }
    rows = [(name, *map(tell, runs)) for name, tell in results.items()] + rows
    return Section("What differs", told, ("", *(_cut(one.name) for one in runs)), rows, ["compared"])


def _measured(found: Sequence[tuple[int, float]]) -> str:
    return f"{found[0][1]:.4g} at step {found[0][0]}" if found else "-"


def _to_plan(facts: Facts) -> str:
    found = against(facts)
    return "-" if found is None or found.ratio is None else f"{found.ratio:.0%}"


def duration(seconds: float) -> str:
    """ "12.3 s", "1:02:03"; days count as hours."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def clock(time: float, offset: timedelta) -> str:
    """A time as the job's clock had it."""
    try:
        return datetime.fromtimestamp(time, timezone(offset)).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "-"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


_MAKERS: tuple[Callable[[Facts], Section], ...] = (
    where, loss, speed, step_time, memory, told_plan, communication, goodput, checkpoints, events, log,
)  # fmt: skip
