"""Writes a report as a page of HTML, as Markdown, or as JSON."""

from __future__ import annotations

import html
import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from hpctrain.toolkit.commands import escaped
from hpctrain_tools.report.against_plan import against
from hpctrain_tools.report.curves import PARTS
from hpctrain_tools.report.facts import Facts
from hpctrain_tools.report.plots import WIDTHS, draw
from hpctrain_tools.report.section import Section
from hpctrain_tools.report.sections import compared, sections_of
from hpctrain_tools.report.verdict import judge

FILE_NAME = "report.html"
"""The page, in the run's directory."""
# ranks that the layout shows
_RANKS = 64


def text_of(runs: Sequence[Facts], kind: str) -> str:
    """The report of runs. kind: "html", "markdown" or "json"."""
    return {"html": html_page, "markdown": markdown, "json": as_json}[kind](runs)


def html_page(runs: Sequence[Facts]) -> str:
    """A file that needs no other. Raises ImportError without matplotlib."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("hpctrain_tools.report", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        finalize=_printable,
    )  # fmt: skip
    return environment.get_template("page.html.j2").render(
        title=_title(runs),
        written=datetime.fromtimestamp(time.time()).astimezone().strftime("%Y-%m-%d %H:%M:%S %z"),
        runs=[_shown(one) for one in runs],
        compared=_drawn(compared(runs), runs) if len(runs) > 1 else None,
    )


def markdown(runs: Sequence[Facts]) -> str:
    """Text for an issue or a notebook, without plots."""
    lines = [f"# {_plain(_title(runs))}"]
    for one in runs:
        verdict = judge(one)
        lines += ["", f"## {_plain(one.name)}" if len(runs) > 1 else "", f"**{_plain(verdict.ended)}**", ""]
        lines.append(f"- Limit: {_plain(verdict.first.limit)}")
        lines += [f"- Next step: {_plain(verdict.first.step)}"] if verdict.first.step else []
        lines += [f"- Also: {_plain(other.told)}" for other in verdict.findings[1:]]
    if len(runs) > 1:
        lines += _section(compared(runs), 2)
    for one in runs:
        lines += ["", f"## {_plain(one.name)}: details"] if len(runs) > 1 else []
        for section in sections_of(one):
            lines += _section(section, 3 if len(runs) > 1 else 2)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def as_json(runs: Sequence[Facts]) -> str:
    """All numbers of the report, and its curves; units are seconds and bytes."""
    return json.dumps([_finite(_numbers(one)) for one in runs], indent=1)


def _title(runs: Sequence[Facts]) -> str:
    return " and ".join(escaped(one.name) for one in runs[:3]) + (" and more" if len(runs) > 3 else "")


def _printable(value: Any) -> Any:
    """Escapes control characters of a text; what is markup already stays."""
    return escaped(value) if type(value) is str else value


def _shown(facts: Facts) -> dict[str, Any]:
    hosts, more = _hosts(facts)
    return {
        "name": facts.name,
        "directory": str(facts.directory),
        "verdict": judge(facts),
        "mesh": facts.described.get("mesh", ""),
        "hosts": hosts,
        "more_ranks": more,
        "sections": [_drawn(section, [facts]) for section in sections_of(facts)],
    }


def _drawn(section: Section, runs: Sequence[Facts]) -> dict[str, Any]:
    from markupsafe import Markup

    plots = []
    for name in section.plots:
        drawn = {width: Markup(draw(name, runs, width)) for width in WIDTHS}
        if all(drawn.values()):
            plots.append({"name": name, **drawn})
    return {
        "title": section.title, "lines": section.lines, "head": section.head, "rows": section.rows, "log": section.log,
        "plots": plots,
    }  # fmt: skip


def _hosts(facts: Facts) -> tuple[list[tuple[str, list[dict[str, Any]]]], int]:
    """The first ranks by host, each with its place on the axes; and how many more there are."""
    layout = facts.layout
    if layout is None or not layout.hosts:
        return [], 0
    found: dict[str, list[dict[str, Any]]] = {}
    for rank, host in enumerate(layout.hosts[:_RANKS]):
        place = layout.place(rank)
        first = next((number for axis, number in place.items() if not axis.startswith("dp")), 0)
        told = " ".join(f"{axis} {number}" for axis, number in place.items())
        found.setdefault(host or "hosts unknown", []).append({"number": rank, "place": told, "color": first % 8})
    return list(found.items()), max(0, len(layout.hosts) - _RANKS)


def _section(section: Section, level: int) -> Iterator[str]:
    yield from ("", f"{'#' * level} {_plain(section.title)}", "")
    yield from (_plain(line) for line in section.lines)
    if section.rows:
        head = section.head or ("", "")
        yield from ("", f"| {' | '.join(map(_plain, head))} |", "|" + " --- |" * len(head))
        yield from (f"| {' | '.join(map(_plain, row))} |" for row in section.rows)
    yield from (f"    {escaped(line)}" for line in section.log)


def _plain(text: str) -> str:
    """Text without a meaning in Markdown or HTML."""
    return re.sub(r"([\\`*_\[\]|~$])", r"\\\1", html.escape(" ".join(escaped(text).split()), quote=False))


def _numbers(facts: Facts) -> dict[str, Any]:
    rows, verdict, newest = facts.rows, judge(facts), facts.rows.newest
    keys = ("loss", "lr", "per_second", "mfu", "goodput", "memory_max", *PARTS)
    return {
        "directory": str(facts.directory),
        "name": facts.name,
        "state": facts.ending.how,
        "verdict": {"ended": verdict.ended, "level": verdict.level, "findings": [asdict(one) for one in verdict.findings]},
        "step": None if newest is None else newest.step,
        "steps": facts.job.last_step(newest),
        "loss": None if newest is None else newest.loss,
        "lowest_loss": rows.lowest and {"step": rows.lowest[0], "loss": rows.lowest[1]},
        "step_seconds": facts.step_seconds,
        "seconds_of_step": {part: rows.steady[part] / rows.steady_steps for part in PARTS} if rows.steady_steps else {},
        "memory_peak_bytes": rows.memory_peak,
        "device_bytes": facts.device_bytes,
        "plan": None if (plan := against(facts)) is None else plan.as_dict(),
        "exposed_seconds": dict(rows.exposed),
        "hidden_seconds": dict(rows.hidden),
        "wall": None if facts.wall is None else {"seconds": facts.wall.seconds, "of": dict(facts.wall.of)},
        "starts": [one.time for one in facts.starts.starts],
        "lost": [asdict(one) for one in facts.starts.lost],
        "axes": None if facts.layout is None else dict(facts.layout.axes),
        "hosts": None if facts.layout is None else list(dict.fromkeys(facts.layout.hosts)),
        "checkpoints": [{"step": step, "time": saved} for step, saved in facts.checkpoints],
        "events": [asdict(one) for one in facts.events],
        "rows": {"lines": rows.seen, "read": rows.read},
        "curves": [
            {"steps": [one.first, one.last], **{key: one.mean(key) for key in keys if one.counts[key]}} for one in rows.points
        ],
        "evaluations": [{"step": one.step, **one.measured} for one in rows.evaluations],
    }  # fmt: skip


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
