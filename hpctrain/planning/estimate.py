"""Estimates the time of a step on a machine from what one rank of each part of the model computes and sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.job.machines import Machine
from hpctrain.planning.rank_plan import Exchange, RankPlan

_HIDDEN_BEHIND = 2 / 3
"""The share of computing behind which sums and gathers of parameters can hide: a backward is two thirds of it."""
_OVERLAPPED = ("reduce_scatter", "all_reduce", "all_gather")


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. computing: of the slowest pipeline stage. exposed: communication that computing does not hide. waiting:
    of a pipeline, which fills and drains."""

    computing: float
    exposed: float
    waiting: float

    @property
    def seconds(self) -> float:
        """All together."""
        return self.computing + self.exposed + self.waiting


def step_time(plans: Sequence[RankPlan], machine: Machine, data_axes: Sequence[str], tf32: bool) -> StepTime:
    """The time of a step. data_axes: those whose communication overlaps with backward."""
    found = []
    for plan in plans:
        computing = _computing(plan, machine, tf32)
        hidden = [one for one in plan.exchanges if one.axis in data_axes and one.operation in _OVERLAPPED]
        shown = [one for one in plan.exchanges if one not in hidden]
        rest = max(0.0, _sending(hidden, machine) - computing * _HIDDEN_BEHIND)
        found.append((computing, rest + _sending(shown, machine)))
    computing, exposed = max(found, key=sum)
    idle = max(one.idle for one in plans)
    waiting = (computing + exposed) * idle / (1 - idle)
    return StepTime(computing, exposed, waiting)


def _computing(plan: RankPlan, machine: Machine, tf32: bool) -> float:
    """Each operator takes the longest of its products, its bytes and its launch."""
    reached = machine.efficiency
    return sum(
        count
        * max(
            one.flops / machine.peak(one.dtype, tf32) / reached,
            one.nbytes / machine.bandwidth / reached,
            machine.launch,
        )
        for one, count in plan.operators
    )


def _sending(exchanges: Sequence[Exchange], machine: Machine) -> float:
    return sum(
        one.sent / (machine.inside if one.inside_node else machine.across) / machine.efficiency
        + one.calls * machine.latency
        for one in exchanges
    )
