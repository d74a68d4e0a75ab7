"""Estimates the time of a step on a machine from what one rank of each part of the model computes and sends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpctrain_tools.plan.machines import Machine, figure_sources
from hpctrain_tools.plan.rank_plan import RING, Exchange, RankPlan

# the share of computing behind which sums and gathers of parameters can hide: a backward is two thirds of it
_HIDDEN_BEHIND = 2 / 3
_LEAST_HIDDEN = 1 / 3
_OVERLAPPED = ("reduce_scatter", "all_reduce", "all_gather")
# factors by which a time may be wrong: kernels of other shapes reach other shares of what they could; seconds that were measured;
# those that are guessed
_SHARES, _MEASURED, _GUESSED = 1.3, 1.25, 2.0


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. computing: of the slowest pipeline stage, of the trainer itself, and on CPUs of loading. exposed:
    communication that computing does not hide. waiting: of a pipeline, which fills and drains. least, most: between which all
    together is; sources: sentences about the figures."""

    computing: float
    exposed: float
    waiting: float
    least: float = 0.0
    most: float = 0.0
    sources: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """All together."""
        return self.computing + self.exposed + self.waiting


def step_time(plans: Sequence[RankPlan], machine: Machine, data_axes: Sequence[str], tf32: bool) -> StepTime:
    """The time of a step, and how sure it is. data_axes: those whose communication overlaps with backward."""

    def of(figures: Machine, behind: float) -> StepTime:
        return _step_time(plans, figures, data_axes, tf32, behind)

    least, most = of(_off(machine, 1.0), 1.0).seconds, of(_off(machine, -1.0), _LEAST_HIDDEN).seconds
    return replace(of(machine, _HIDDEN_BEHIND), least=least, most=most, sources=tuple(figure_sources(machine)))


def _off(machine: Machine, sign: float) -> Machine:
    """The machine if all its figures were wrong on the same side; sign: 1 for a faster one, -1 for a slower one."""
    seconds = {
        name: getattr(machine, name) * (_MEASURED if name in machine.measured else _GUESSED) ** -sign
        for name in ("latency", "launch", "overhead")
    }
    return machine.model_copy(update={**seconds, "efficiency": machine.efficiency * _SHARES**sign})


def _step_time(
    plans: Sequence[RankPlan], machine: Machine, data_axes: Sequence[str], tf32: bool, behind: float
) -> StepTime:
    found = []
    for plan in plans:
        computing = _computing(plan, machine, tf32)
        hidden = [one for one in plan.exchanges if one.axis in data_axes and one.operation in _OVERLAPPED]
        # the first gather and the last sum have nothing to hide behind
        ends = sum(_sending(one, machine) / one.calls for one in hidden)
        rest = max(ends, sum(_sending(one, machine) for one in hidden) - computing * behind)
        shown = sum(_sending(one, machine) for one in plan.exchanges if one not in hidden)
        found.append((computing, rest + shown))
    computing, exposed = max(found, key=sum)
    idle = max(one.idle for one in plans)
    waiting = (computing + exposed) * idle / (1 - idle)
    beside = 0.0 if machine.accelerator else max(one.loading for one in plans)
    return StepTime(computing + beside + machine.overhead, exposed, waiting)


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


def _sending(one: Exchange, machine: Machine) -> float:
    """The seconds of operations on an axis. A ring of ranks goes through each node once, and as many rings as ranks of the group
    in a node share the data, each over the adapter of another one. Other messages leave over the sender's own adapter: the
    slowest of neighbours sends all of them there."""
    nodes = math.ceil(one.ranks / one.in_node)
    inside, across = one.sent, 0.0
    if nodes > 1:
        if one.operation in RING:
            across = one.sent / one.in_node
            inside = one.sent if one.in_node > 1 else 0.0
        else:
            leaving = 1.0 if one.operation == "send" else (one.ranks - one.in_node) / (one.ranks - 1)
            across = one.sent * leaving
            inside = one.sent - across
    seconds = max(inside / machine.inside, across / machine.across) / machine.efficiency
    hops = 1 + math.log2(nodes) if one.operation == "all_reduce" else nodes
    return seconds + one.calls * machine.latency * (hops if one.operation in RING else 1)
