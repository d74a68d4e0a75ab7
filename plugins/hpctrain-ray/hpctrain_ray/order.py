"""An order to start ranks on a Ray cluster, as plain values. Imports neither torch nor ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


@dataclass(frozen=True)
class Bundle:
    """The resources of one rank, as Ray counts them; parts of a GPU are allowed."""

    cpus: float = 1.0
    gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)

    def as_ray(self) -> dict[str, float]:
        """The bundle of a placement group."""
        named = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: amount for name, amount in named.items() if amount}

    def __str__(self) -> str:
        return ", ".join(f"{amount:g} {name}" for name, amount in self.as_ray().items())


@dataclass(frozen=True)
class Order:
    """The ranks to start. bundles: one for each rank.

    job: the job file, which all nodes see, or which is sent to them where `text` has its content. output: the run's directory.
    overrides: "table.key=value".
    directory: where relative paths of the job start. placement_limit: seconds until there is room for
    the ranks. seconds: until a start ends, None for any time; save_seconds before that the ranks save. resume: of the first start.
    over_mpi: whether the ranks talk over MPI.
    """

    job: Path
    directory: Path
    output: Path
    bundles: Sequence[Bundle]
    strategy: Strategy = "PACK"
    placement_limit: float = 300.0
    restarts: int = 0
    overrides: Sequence[str] = ()
    text: str | None = None
    resume: str = "auto"
    seconds: float | None = None
    save_seconds: float = 120.0
    over_mpi: bool = False


def listed(bundles: Sequence[Bundle]) -> str:
    """The bundles in words, such as "2 x (1 CPU), 1 x (4 CPU, 0.5 GPU)"."""
    counts: dict[str, int] = {}
    for one in bundles:
        counts[str(one)] = counts.get(str(one), 0) + 1
    return ", ".join(f"{count} x ({one})" for one, count in counts.items())
