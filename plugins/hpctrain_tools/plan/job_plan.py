"""The plan of a job, as numbers and as a text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain_tools.plan.estimate import StepTime
from hpctrain_tools.plan.rank_plan import OTHERS, RankPlan

# ranks of which a table has columns
_SHOWN = 6


@dataclass(frozen=True)
class JobPlan:
    """The needs of a job: one rank for each part of the model.

    memory: bytes of a device, None if that is not known. time: None without a machine. left_out: what the plan does not have. job:
    the tables that memory depends on, with their defaults.
    """

    sharding: str
    precision: str
    ranks: list[RankPlan]
    world: int
    per_node: int
    memory: float | None
    time: StepTime | None
    left_out: list[str]
    job: Mapping[str, Any]

    @property
    def largest(self) -> RankPlan:
        """The rank that needs the most memory."""
        return max(self.ranks, key=lambda one: one.most)

    @property
    def fits(self) -> bool | None:
        """Whether the largest rank fits into the memory of a device; None if that is not known."""
        return None if self.memory is None else self.largest.most <= self.memory

    def as_dict(self) -> dict[str, Any]:
        """The plan for JSON, in bytes, seconds and floating-point operations."""
        return {
            "ranks": self.world,
            "job": self.job,
            "axes": self.ranks[0].axes,
            "peak_bytes": self.largest.most,
            "memory_bytes": self.memory,
            "fits": self.fits,
            "step_seconds": None if self.time is None else self.time.seconds,
            "step": None if self.time is None else vars(self.time),
            "left_out": self.left_out,
            "of_ranks": [_as_dict(one) for one in self.ranks],
        }

    def lines(self) -> Iterator[str]:
        """The plan as a text."""
        layout = " x ".join(f"{axis} {n}" for axis, n in self.ranks[0].axes.items() if n > 1) or "one rank"
        yield f"layout        {layout}; sharding {self.sharding}; {self.precision}"
        shown = sorted(self.ranks, key=lambda one: -one.most)[:_SHOWN]
        yield from _memory_lines(sorted(shown, key=lambda one: one.rank), len(self.ranks))
        yield from _exchange_lines(self.largest)
        yield f"computing     {max(one.flops for one in self.ranks) / 1e12:.3g} TFLOP on a rank in a step"
        if self.time is not None:
            told = f"computing {self.time.computing:.3g}, communication that it does not hide {self.time.exposed:.3g}"
            if self.time.waiting:
                told += f", waiting of a pipeline {self.time.waiting:.3g}"
            between = f"{self.time.least:.3g} to {self.time.most:.3g}"
            yield f"step          about {self.time.seconds:.3g} s, {between}: {told}"
            for sentence in self.time.sources:
                yield f"  {sentence}"
        for sentence in self.left_out:
            yield f"note          {sentence}"
        if self.memory is not None:
            word = "fits" if self.fits else "does not fit"
            most = f"{gigabytes(self.largest.most)} of {gigabytes(self.memory)} GB"
            yield f"memory        {word}: rank {self.largest.rank} needs {most}"


def _memory_lines(ranks: Sequence[RankPlan], of: int) -> Iterator[str]:
    rows = {
        "parameters": [one.parameters for one in ranks],
        "gradients": [one.gradients for one in ranks],
        "optimizer state": [one.optimizer_state for one in ranks],
        "inputs of a step": [one.inputs for one in ranks],
        "peak of a step": [one.peak for one in ranks],
        f"  {OTHERS}": [one.at_peak[OTHERS] for one in ranks],
        "peak of the start": [one.start for one in ranks],
        "peak of a save": [one.save.peak for one in ranks],
        "in the host's memory": [max(one.host, one.save.host) for one in ranks],
    }
    width = max(map(len, rows)) + 2
    more = f", the largest {len(ranks)} of {of} parts of the model" if of > len(ranks) else ""
    yield f"{f'GB on{more}':<{width}}" + "".join(f"{f'rank {one.rank}':>12}" for one in ranks)
    for name, values in rows.items():
        yield f"{name:<{width}}" + "".join(f"{gigabytes(value):>12}" for value in values)


def _exchange_lines(plan: RankPlan) -> Iterator[str]:
    if not plan.exchanges:
        return
    yield f"rank {plan.rank} sends in a step"
    for one in sorted(plan.exchanges, key=lambda one: -one.sent):
        where = "inside a node" if one.inside_node else "between nodes"
        times = f"{one.calls} time{'s' if one.calls > 1 else ''}"
        yield f"  {gigabytes(one.sent)} GB in {one.operation} over {one.axis}, {one.ranks} ranks {where}, {times}"


def _as_dict(plan: RankPlan) -> dict[str, Any]:
    flops: dict[str, int] = defaultdict(int)
    for one, count in plan.operators:
        flops[one.dtype] += one.flops * count
    return {
        "rank": plan.rank,
        "parameters_bytes": plan.parameters,
        "gradients_bytes": plan.gradients,
        "optimizer_state_bytes": plan.optimizer_state,
        "inputs_bytes": plan.inputs,
        "most_bytes": plan.most,
        "peak_bytes": plan.peak,
        "at_peak_bytes": plan.at_peak,
        "origins_bytes": dict(sorted(plan.origins.items(), key=lambda one: -one[1])),
        "start_bytes": plan.start,
        "save": vars(plan.save),
        "host_bytes": max(plan.host, plan.save.host),
        "flops": {dtype: number for dtype, number in flops.items() if number},
        "micro_batches": plan.micro_batches,
        "exchanges": [vars(one) | {"inside_node": one.inside_node, "sent_bytes": one.sent} for one in plan.exchanges],
    }


def gigabytes(nbytes: float) -> str:
    """Gigabytes of 10^9 bytes, with three digits."""
    value = nbytes / 1e9
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"
