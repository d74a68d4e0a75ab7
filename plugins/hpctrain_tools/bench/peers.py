"""The measurement of other trainers beside hpctrain, and the comparison of their losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hpctrain.api import UsageError, gather_values
from hpctrain_tools.bench.figures import Figure, Ratio
from hpctrain_tools.bench.libraries import PEERS, missing
from hpctrain_tools.bench.task import Task
from hpctrain_tools.bench.trainers import Trainer
from hpctrain_tools.bench.turns import COMPARED, Turn, Turns


@dataclass(frozen=True)
class Peer:
    """A trainer's result. ratio: hpctrain's seconds to its own; difference: of its losses from hpctrain's, relative."""

    name: str
    step: Figure
    ratio: Ratio
    losses: Sequence[float]
    difference: float

    def as_dict(self) -> dict[str, Any]:
        """JSON: the figures of the step are at the first level. null in place of a number that is not finite."""
        found = asdict(self) | {"losses": [*map(_finite, self.losses)], "difference": _finite(self.difference)}
        return {"name": found.pop("name"), **found.pop("step"), **found}


@dataclass(frozen=True)
class PeersResult:
    """The result of `hpctrain bench peers`. left_out: why a trainer has no figures."""

    job: str
    ranks: int
    steps: int
    tolerance: float
    trainers: Sequence[Peer]
    left_out: dict[str, str]

    @property
    def different(self) -> list[Peer]:
        """Trainers whose losses are not hpctrain's."""
        return [one for one in self.trainers if not one.difference <= self.tolerance]

    def as_dict(self) -> dict[str, Any]:
        """JSON."""
        found = {key: getattr(self, key) for key in ("job", "ranks", "steps", "tolerance", "left_out")}
        return {**found, "trainers": [one.as_dict() for one in self.trainers]}

    def lines(self) -> list[str]:
        """A table of a line each."""
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        told = [f"{self.job} on {ranks}, {self.steps} steps in turns: median, ± half the interquartile range"]
        for one in self.trainers:
            losses = "" if one.name == "hpctrain" else f"  {one.ratio}  losses differ by {one.difference:.1e}"
            told.append(f"{one.name:12}{one.step}{losses}")
        told.append("ratio: hpctrain's time to that of the other")
        told += [f"{name}: {why}" for name, why in self.left_out.items()]
        for one in self.different:
            theirs, ours = (", ".join(f"{loss:.6g}" for loss in each.losses) for each in (one, self.trainers[0]))
            told.append(
                f"{one.name} trains something else: its first losses are {theirs}, hpctrain's are {ours}, "
                f"expected a relative difference of at most {self.tolerance:g}"
            )
        return told


@dataclass
class Peers:
    """The trainers of the given names, as far as they are installed."""

    names: Sequence[str]
    left_out: dict[str, str] = field(default_factory=dict)

    def choose(self, task: Task) -> list[type[Trainer]]:
        """The trainers that are installed on all ranks. Collective. Raises UsageError for a job that only hpctrain trains."""
        why = task.hindrance()
        if why:
            raise UsageError(f"bench peers: {why}; expected a job of data parallelism alone, without a scaled loss")
        found = []
        for name in self.names:
            lacks = next((one for one in gather_values(missing(name)) if one), "")
            if lacks:
                self.left_out[name] = lacks
            else:
                found.append(PEERS[name])
        return found

    def result(self, turns: Turns) -> PeersResult:
        """The result on every rank."""
        mine = turns.hpctrain
        trainers = [self._peer(one, mine) for one in (mine, *turns.others)]
        return PeersResult(
            turns.job, turns.ranks, len(mine.measured), turns.tolerance, trainers, self.left_out | turns.failed
        )

    @staticmethod
    def _peer(one: Turn, mine: Turn) -> Peer:
        return Peer(
            one.name, Figure.of(one.measured), Ratio.of(mine.ratios(one)), one.losses, one.difference(mine, COMPARED)
        )


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def chosen(only: str | None) -> list[str]:
    """The names in --only; all without. Raises UsageError for unknown ones."""
    names = list(PEERS) if only is None else only.split(",")
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise UsageError(f"--only: unknown {', '.join(unknown)}; expected some of {', '.join(PEERS)}, with commas")
    return list(dict.fromkeys(names))
