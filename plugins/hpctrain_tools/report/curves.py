"""The rows of a run, summed up and thinned to a few hundred points, however many there are."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from hpctrain_tools.runs import Evaluation, RunDirectory, Step, is_evaluation, parts_of, read_row

PARTS = ("forward", "backward", "communication", "optimizer", "other", "data", "evaluation", "checkpoint")
"""The parts of a step's time; what a file has besides counts as other."""
_POINTS = 400
# A file up to this size is read whole; of a larger one every so-manyth row, so that it takes no longer
_WHOLE_BYTES = 128 * 2**20
_KEYS, _EVALUATIONS = 64, 2000
# seconds of a step, and since 1970: a crafted file may have any
_LONGEST, _LATEST = 1e8, 1e10
_SINGLE = ("lr", "per_second", "mfu", "goodput", "memory_max", "memory_mean", "grad_norm", "pipeline_bubble")


@dataclass
class Point:
    """Neighbouring steps, of which `sums` has the values added up, and `counts` how many rows had one."""

    first: int
    last: int
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: Counter[str] = field(default_factory=Counter)
    low: float = float("inf")
    high: float = float("-inf")
    """The smallest and the largest loss."""

    def mean(self, key: str) -> float | None:
        """The mean of the rows that have the key."""
        return self.sums[key] / self.counts[key] if self.counts[key] else None

    def add(self, key: str, value: float | None) -> None:
        """Count a value, if there is one."""
        if value is not None and abs(value) < 1e150:  # sums of larger ones may not be finite
            self.sums[key] += value
            self.counts[key] += 1

    def absorb(self, other: Point) -> None:
        """Take over the neighbour that follows."""
        self.last = other.last
        for key, value in other.sums.items():
            self.sums[key] += value
        self.counts += other.counts
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)


@dataclass
class StartRows:
    """The rows that a start of the run has written and that count. begun: the time at which the first of them begins."""

    begun: float | None = None
    ended: float | None = None
    read: int = 0
    """Rows that were parsed."""
    memory_max: float | None = None
    memory_mean: float | None = None
    """The largest ones of its rows."""
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))


@dataclass
class Rows:
    """Sums and curves of metrics.jsonl."""

    points: list[Point] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    newest: Step | None = None
    seen: int = 0
    """Lines of the file."""
    read: int = 0
    """Rows of steps that were parsed."""
    weight: float = 0.0
    """Rows of steps that these stand for."""
    of_starts: dict[int, StartRows] = field(default_factory=lambda: defaultdict(StartRows))
    """Rows by the number of the start, from 0."""
    steady: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by part, without the first step of a start, which includes what happens once."""
    steady_steps: float = 0.0
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    hidden: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    bandwidth: dict[str, Point] = field(default_factory=dict)
    stragglers: dict[tuple[int, str, str], tuple[float, float]] = field(default_factory=dict)
    """Steps and seconds lost by rank, node and cause."""
    saves: float = 0.0
    """Rows with time for a save."""
    guards: Counter[str] = field(default_factory=Counter)
    skipped: list[int] = field(default_factory=list)
    """The first steps that were left out."""
    memory_peak: float | None = None
    lowest: tuple[int, float] | None = None
    """The step with the lowest loss."""
    best: tuple[int, float] | None = None
    """The step of the evaluation with the lowest loss."""
    not_finite: int = 0

    @property
    def losses(self) -> list[tuple[int, float]]:
        """The evaluations' losses by their steps."""
        return [(one.step, loss) for one in self.evaluations if (loss := one.measured.get("loss")) is not None]


class RowReader:
    """Reads metrics.jsonl in pieces."""

    def __init__(self, run: RunDirectory, starts: list[float]) -> None:
        """starts: the times of the run's starts, in order."""
        self._run, self._starts = run, starts
        self._random = random.Random(0)
        self._every = 1
        # steps of a point
        self._each = 1

    def read(self) -> Rows:
        """All rows. A row that can't be read is left out, and so are the rest of a file that the system can't read."""
        rows = Rows()
        with suppress(OSError):
            self._every = max(1, -(-self._run.metrics.lstat().st_size // _WHOLE_BYTES))
            for part in parts_of(self._run.metrics):
                if part.anew:
                    rows = Rows()
                self._take(rows, part.lines)
        newest = self._run.newest_rows().step if self._every > 1 else None
        if newest is not None and (rows.newest is None or newest.step > rows.newest.step):
            self._step(rows, newest, 0)  # its block's random row counts for it
        return rows

    def _take(self, rows: Rows, lines: tuple[bytes, ...]) -> None:
        # any fixed place in a block would meet each save of a run that saves after as many steps, or none
        for begin in range(0, len(lines), self._every):
            block = lines[begin : begin + self._every]
            chosen = self._random.randrange(len(block)) if self._every > 1 else 0
            for number, line in enumerate(block):
                if number == chosen or is_evaluation(line):
                    row = read_row(line)
                    if isinstance(row, Step):
                        self._step(rows, row, len(block))
                    elif row is not None:
                        _evaluated(rows, row)
        rows.seen += len(lines)

    def _step(self, rows: Rows, row: Step, weight: int) -> None:
        of_start = self._start_of(rows, row)
        is_first = self._count_time(rows, of_start, row, weight)
        rows.newest, rows.read, rows.weight = row, rows.read + 1, rows.weight + weight
        if row.loss is None:
            rows.not_finite += weight
        elif rows.lowest is None or row.loss < rows.lowest[1]:
            rows.lowest = row.step, row.loss
        if row.memory_max is not None:
            rows.memory_peak = max(rows.memory_peak or 0.0, row.memory_max)
            of_start.memory_max = max(of_start.memory_max or 0.0, row.memory_max)
        if row.memory_mean is not None:
            of_start.memory_mean = max(of_start.memory_mean or 0.0, row.memory_mean)
        if row.guard and (row.guard in rows.guards or len(rows.guards) < _KEYS):
            rows.guards[row.guard] += weight
        if row.skipped and len(rows.skipped) < _KEYS:
            rows.skipped.append(row.step)
        if row.straggler is not None:
            one = row.straggler
            key = one.rank, one.node, one.cause
            if 0 <= one.excess_seconds < _LONGEST and (key in rows.stragglers or len(rows.stragglers) < _KEYS):
                steps, seconds = rows.stragglers.get(key, (0.0, 0.0))
                rows.stragglers[key] = steps + weight, seconds + weight * one.excess_seconds
        for total, found in ((rows.exposed, row.exposed), (rows.hidden, row.hidden)):
            for name, value in found.items():
                if 0 <= value < _LONGEST and (name in total or len(total) < _KEYS):
                    total[name] += weight * value
        for name, value in row.bandwidth.items():
            if name in rows.bandwidth or len(rows.bandwidth) < _KEYS:
                rows.bandwidth.setdefault(name, Point(row.step, row.step)).add(name, value)
        self._draw(rows, row, is_first)

    def _start_of(self, rows: Rows, row: Step) -> StartRows:
        number = sum(1 for time in self._starts if row.time is not None and time <= row.time) - 1
        return rows.of_starts[max(0, number)]

    def _count_time(self, rows: Rows, of_start: StartRows, row: Step, weight: int) -> bool:
        """Count the row's seconds. Returns whether they are those of the first step of a start."""
        parts = {name: seconds for name, seconds in row.parts.items() if 0 <= seconds < _LONGEST}
        whole = sum(parts.values())
        # an accelerator's row has the times of the step before, so its first row has none
        is_first = of_start.read == 0 or (of_start.read == 1 and not any(of_start.seconds.values()))
        of_start.read += 1
        if row.time is not None and 0 <= row.time < _LATEST:
            of_start.begun = row.time - whole if of_start.begun is None else of_start.begun
            of_start.ended = row.time
        for name, seconds in parts.items():
            name = name if name in PARTS else "other"
            of_start.seconds[name] += weight * seconds
            if not is_first:
                rows.steady[name] += weight * seconds
        if not is_first:
            rows.steady_steps += weight
        rows.saves += weight * (parts.get("checkpoint", 0.0) > 0.01 * whole)
        return is_first

    def _draw(self, rows: Rows, row: Step, is_first: bool) -> None:
        point = Point(row.step, row.step)
        point.add("loss", row.loss)
        if row.loss is not None:
            point.low = point.high = row.loss
        for key in _SINGLE:
            if not (is_first and key in ("per_second", "mfu")):
                point.add(key, getattr(row, key))
        if not is_first and row.parts:
            for name in PARTS:
                point.add(name, min(max(0.0, row.parts.get(name, 0.0)), _LONGEST))
        newest = rows.points[-1] if rows.points else None
        if newest is not None and newest.last - newest.first + 1 < self._each and row.step > newest.last:
            newest.absorb(point)
        else:
            rows.points.append(point)
        if len(rows.points) > 2 * _POINTS:
            self._each = 2 * max(self._each, (row.step - rows.points[0].first) // (2 * _POINTS))
            for one, other in zip(rows.points[::2], rows.points[1::2], strict=False):
                one.absorb(other)
            rows.points = rows.points[::2]


def _evaluated(rows: Rows, row: Evaluation) -> None:
    rows.evaluations.append(row)
    loss = row.measured.get("loss")
    if loss is not None and (rows.best is None or loss < rows.best[1]):
        rows.best = row.step, loss
    if len(rows.evaluations) > 2 * _EVALUATIONS:
        rows.evaluations = [*rows.evaluations[:-1:2], rows.evaluations[-1]]


def mean_of(points: Sequence[Point], key: str) -> float | None:
    """The mean of a key over all rows that have it."""
    count = sum(one.counts[key] for one in points)
    return sum(one.sums[key] for one in points) / count if count else None
