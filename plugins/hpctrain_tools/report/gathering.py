"""Gathers the facts of a run from its files, each read once and piece by piece."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from hpctrain_tools.report.curves import RowReader, Rows, StartRows
from hpctrain_tools.report.facts import Ending, Event, Facts, How, Layout
from hpctrain_tools.report.plan_file import JobPlan
from hpctrain_tools.report.wall_time import Stretch, WallTime, account
from hpctrain_tools.runs import (
    KILLED,
    Failure,
    LogSeen,
    Lost,
    RunDirectory,
    Standing,
    Start,
    StartsSeen,
    find_failure,
    last_lines,
    read_log,
    read_starts,
    standing_of,
)

_LINES = 30
# seconds: the log of a start begins about when the start is noted, after it
_EARLIER = 1.0
_MOST_RANKS = 100_000
_AXIS = re.compile(r"(\w+) (\d+)")


def gather(directory: Path, ending: Ending | None = None, plan: JobPlan | None = None) -> Facts:
    """Read a run. ending: how it ends, where the run itself asks, whose files do not say so yet. plan: to compare it with."""
    run = RunDirectory(directory)
    job, starts, log = run.job(), read_starts(directory), read_log(run.log)
    rows = RowReader(run, [one.time for one in starts.starts]).read()
    # the run itself, which asks with its ending, would lose its lock by a look at it
    ended = ending or _ending(standing_of(run, job, rows.newest), directory)
    offset = starts.starts[-1].offset if starts.starts else timedelta()
    is_over = ended.how not in ("running", "pending", "unknown")
    end = None if is_over and ending is None else time.time()
    submission = run.submission()
    described = dict(log.starts[-1].facts) if log.starts else {}
    return Facts(
        directory,
        job,
        run.tables(),
        ended,
        starts,
        rows,
        _wall_time(starts, log, rows, end),
        _layout(starts.starts, described.get("mesh", "")),
        described,
        run.checkpoints(),
        list(log.remarks),
        last_lines(run.log, _LINES),
        _events(starts, log),
        (submission.target, submission.id) if submission is not None and submission.id else None,
        offset,
        plan,
    )


def _ending(standing: Standing, directory: Path) -> Ending:
    if standing.word != "failed":
        how: How = standing.word
        return Ending(how, standing.detail)
    found = find_failure(directory)
    if found is None or found.kind == KILLED:
        return Ending("killed", found.text if found else "", found)
    return failed(found)


def failed(found: Failure) -> Ending:
    """The ending of a run in which a rank has failed."""
    return Ending("failed", found.text, found)


def _wall_time(starts: StartsSeen, log: LogSeen, rows: Rows, end: float | None) -> WallTime | None:
    """end: None for a run that is over, which ended with its last sign: times of files are those of a copy in a copied run."""
    stretches: list[Stretch] = []
    for number, one in enumerate(starts.starts):
        of_start = rows.of_starts.get(number, StartRows())
        following = starts.starts[number + 1].time if number + 1 < len(starts.starts) else end
        signs = [one.time, of_start.ended or one.time, *_last_words(log, one, following)]
        ends = max(signs) if following is None else max(one.time, following)
        until = ends if following is end else min(ends, max(signs))
        stretches.append(Stretch(one.time, until, ends, of_start))
    for lost in starts.lost:
        assign(lost, stretches)
    return account(stretches, sum(one.steps for one in starts.lost))


def assign(lost: Lost, stretches: Sequence[Stretch]) -> None:
    """Give lost seconds to the starts that spent them. A resume notes them before its first row, and earlier starts spent them; a
    rollback notes its own."""
    here = max((n for n, one in enumerate(stretches) if one.at <= lost.time), default=0)
    is_resume = here > 0 and not stretches[here].lost and lost.time <= (stretches[here].rows.begun or lost.time)
    spent = list(reversed(stretches[:here])) if is_resume else [stretches[here]]
    left = lost.seconds
    # a start that was killed may have trained steps after the last sign of it that is left
    for one, room in [*((one, one.room) for one in spent), *((one, one.silence) for one in spent)]:
        taken = min(left, room)
        one.lost, left = one.lost + taken, left - taken


def _last_words(log: LogSeen, start: Start, until: float | None) -> list[float]:
    """The time of the last line that the log has of a start; none if it has no such start. until: the next start."""
    found = []
    for one in log.starts:
        begun = one.begun.timestamp()
        if start.time - _EARLIER <= begun and (until is None or begun < until - _EARLIER):
            found.append(one.last.timestamp())
    return found


def counted(start: Start) -> str:
    """ "8 ranks on 2 hosts" """
    ranks, hosts = start.ranks, len(start.hosts)
    return f"{ranks} rank{'s' if ranks != 1 else ''} on {hosts} host{'s' if hosts != 1 else ''}"


def _layout(starts: Sequence[Start], mesh: str) -> Layout | None:
    if not starts or starts[-1].ranks > _MOST_RANKS:
        return None
    newest = starts[-1]
    ranks = newest.ranks
    counts = newest.ranks_of_hosts
    if len(counts) != len(newest.hosts) or sum(counts) != ranks:
        each = ranks // len(newest.hosts) if newest.hosts and ranks % len(newest.hosts) == 0 else 0
        counts = tuple(each for _ in newest.hosts)
    hosts = tuple(host for host, count in zip(newest.hosts, counts, strict=True) for _ in range(count))
    axes = {axis: int(size) for axis, size in _AXIS.findall(mesh.partition(";")[0]) if len(size) < 7}
    whole = 1
    for size in axes.values():
        whole *= size
    return Layout(axes if whole == ranks else {}, hosts if len(hosts) == ranks else ("",) * ranks)


def _events(starts: StartsSeen, log: LogSeen) -> list[Event]:
    found = [
        Event(one.time, "start" if number == 0 else "restart", counted(one)) for number, one in enumerate(starts.starts)
    ]
    found += [
        Event(
            one.time,
            "lost",
            f"back to step {one.back_to_step}: {one.steps} steps, {one.seconds:.0f} s are trained again",
        )
        for one in starts.lost
    ]
    for line in log.remarks:
        kind = (
            "warning"
            if line.level == "WARNING"
            else line.text.removeprefix("the ").split()[0]
            if line.level == "INFO"
            else line.level.lower()
        )
        found.append(Event(line.time.timestamp(), kind, line.text))
    return sorted(found, key=lambda one: one.time)
