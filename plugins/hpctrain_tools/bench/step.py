"""The measurement of a step: its time, its parts, and the ratio to a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpctrain_tools.bench.figures import Figure, Ratio
from hpctrain_tools.bench.task import Task
from hpctrain_tools.bench.trainers import Trainer
from hpctrain_tools.bench.turns import Turns


def split(rows: Sequence[Mapping[str, Any]]) -> dict[str, Figure]:
    """The figures of each part of the steps, from the table `seconds` of their rows; without parts that take no time."""
    of_rows = [dict(row["seconds"]) for row in rows]
    names = dict.fromkeys(name for row in of_rows for name, seconds in row.items() if seconds > 0)
    return {name: Figure.of([row.get(name, 0.0) for row in of_rows]) for name in names}


@dataclass(frozen=True)
class StepResult:
    """The result of `hpctrain bench step`. reference: the plain loop; None, and a note, where it can't train the job."""

    job: str
    ranks: int
    steps: int
    step: Figure
    parts: dict[str, Figure]
    reference: Figure | None
    ratio: Ratio | None
    note: str

    def as_dict(self) -> dict[str, Any]:
        """JSON: the figures of the step itself are at the first level."""
        found = asdict(self)
        return {**{key: found[key] for key in ("job", "ranks", "steps")}, **found.pop("step"), **found}

    def lines(self) -> list[str]:
        """A table of a line each."""
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        told = [f"{self.job} on {ranks}, {self.steps} steps: median, ± half the interquartile range"]
        told.append(f"step            {self.step}")
        for name, figure in self.parts.items():
            told.append(f"  {name:14}{figure}  {figure.seconds / self.step.seconds:5.1%}")
        if self.reference is not None and self.ratio is not None:
            told.append(f"plain PyTorch   {self.reference}  each rank alone, batches in memory")
            told.append(f"ratio           {self.ratio}  hpctrain to plain PyTorch, in turns")
        return [*told, *([f"no reference: {self.note}"] if self.note else [])]


def plain_loop(task: Task) -> list[type[Trainer]]:
    """The reference: a loop on each rank by itself, where it can train the job."""
    return [] if task.hindrance() else [Trainer]


def measured_step(turns: Turns) -> StepResult:
    """The result on rank 0."""
    seconds, mine = turns.hpctrain.measured, turns.hpctrain
    plain = turns.others[0] if turns.others else None
    note = turns.hindrance or turns.failed.get(Trainer.name, "")
    if plain is not None and plain.difference(mine, 1) > turns.tolerance:
        note = f"the first loss of the plain loop is {plain.losses[0]:.6g}, hpctrain's is {mine.losses[0]:.6g}"
        plain = None
    return StepResult(
        turns.job, turns.ranks, len(seconds), Figure.of(seconds), split(turns.rows),
        None if plain is None else Figure.of(plain.measured),
        None if plain is None else Ratio.of(mine.ratios(plain)), note,
    )  # fmt: skip
