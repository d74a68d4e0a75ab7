"""The plan of a job on a number of ranks, and how it is told."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from hpctrain.base.errors import UsageError
from hpctrain.checking.check import CheckedJob
from hpctrain.checking.full_check import check_thoroughly
from hpctrain.job.raw import RawJob
from hpctrain.job.tables import Job
from hpctrain.model.mesh import layout_of
from hpctrain.planning.estimate import StepTime, step_time
from hpctrain.planning.fresh import plan_ranks_apart
from hpctrain.planning.machines import Machine, open_machine
from hpctrain.planning.processes import plan_ranks
from hpctrain.planning.rank_plan import OTHERS, RankPlan

_SHOWN = 6
"""Ranks of which a table has columns."""


@dataclass(frozen=True)
class JobPlan:
    """The needs of a job: one rank for each part of the model.

    memory: bytes of a device, None if that is not known. time: None without a machine. left_out: what the plan does not have.
    """

    checked: CheckedJob
    ranks: list[RankPlan]
    world: int
    per_node: int
    memory: float | None
    time: StepTime | None
    left_out: list[str]

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
        parts, size = self.checked.parts, self.ranks[0].axes
        layout = " x ".join(f"{axis} {n}" for axis, n in size.items() if n > 1) or "one rank"
        yield f"layout        {layout}; sharding {parts.sharding.name}; {self.checked.job.precision.mode}"
        shown = sorted(self.ranks, key=lambda one: -one.most)[:_SHOWN]
        yield from _memory_lines(sorted(shown, key=lambda one: one.rank), len(self.ranks))
        yield from _exchange_lines(self.largest)
        yield f"computing     {max(one.flops for one in self.ranks) / 1e12:.3g} TFLOP on a rank in a step"
        if self.time is not None:
            told = f"computing {self.time.computing:.3g}, communication that it does not hide {self.time.exposed:.3g}"
            if self.time.waiting:
                told += f", waiting of a pipeline {self.time.waiting:.3g}"
            yield f"step          about {self.time.seconds:.3g} s: {told}"
        for sentence in self.left_out:
            yield f"note          {sentence}"
        if self.memory is not None:
            word = "fits" if self.fits else "does not fit"
            yield f"memory        {word}: rank {self.largest.rank} needs {_gb(self.largest.most)} of {_gb(self.memory)} GB"


def make_plan(
    raw: RawJob,
    world: int,
    per_node: int | None = None,
    machine: Machine | None = None,
    memory: float | None = None,
    apart: bool = False,
) -> JobPlan:
    """Plan the job on `world` ranks. per_node: of a node; None for the machine's devices. memory: bytes of a device; None for the
    machine's. apart: in a new process of Python, needed where this one may have differentiated before. Raises the errors of
    `hpctrain check`, and EnvironmentUnfitError where a plugin needs the values of tensors."""
    if dist.is_initialized():
        raise UsageError(
            "a plan sets torch.distributed up itself, but it is set up already; plan before, or in another process"
        )
    raw = _planned_job(raw, machine)
    checked, _ = check_thoroughly(raw, world)
    on_node = per_node or (machine.per_node if machine is not None else 8)
    if machine is not None and not machine.accelerator:
        ranks = plan_ranks(checked, world, on_node, on_cpu=True)
    else:
        ranks = plan_ranks_apart(raw, world, on_node) if apart else plan_ranks(checked, world, on_node)
    time = None
    if machine is not None:
        data_axes = layout_of(checked.job, checked.parts, world).data_axes
        time = step_time(ranks, machine, data_axes, checked.job.precision.mode == "tf32")
    limit = memory if memory is not None or machine is None else machine.memory
    return JobPlan(checked, ranks, world, on_node, limit, time, list(_left_out(checked, ranks)))


def _planned_job(raw: RawJob, machine: Machine | None) -> RawJob:
    """The job with the precision that "auto" is on the machine, by default one with bf16, and without processes for samples."""
    tables = copy.deepcopy(raw.tables)
    tables.setdefault("dataset", {})["workers"] = 0
    precision = tables.setdefault("precision", {})
    if precision.get("mode", "auto") == "auto":
        has_bf16 = machine is None or machine.peak("bfloat16", False) > machine.peak("float32", False)
        precision["mode"] = "bf16" if has_bf16 else "fp32"
    return replace(raw, tables=tables)


def _left_out(checked: CheckedJob, ranks: Sequence[RankPlan]) -> Iterator[str]:
    """Sentences about what the plan does not have."""
    if checked.job.compile.enabled:
        yield "[compile]: planned without; compiled kernels keep less memory"
    if checked.parts.compression.name != "none":
        yield "[compression]: planned without; less is sent between nodes"
    guesses = max(one.guesses for one in ranks)
    if guesses and len(ranks) == 1:
        yield (
            f"an integer or a truth value was asked of tensors {guesses} times, and 0 or False was the answer: if shapes depend on "
            "it, the plan is wrong"
        )


def plan(
    job: Job | Mapping[str, Any],
    ranks: int = 1,
    *,
    per_node: int | None = None,
    machine: str | Machine | None = None,
    memory: float | None = None,
) -> JobPlan:
    """Plan `job` on so many ranks, as `hpctrain plan` does: memory, communication and computing of a step.

    job: as `hpctrain.load_job` gives it, or tables as in a job file. machine: a shipped one's name, a file, or a Machine: then the
    plan has a time, too. memory: bytes of a device; None for the machine's. Errors that a user can fix are HpctrainErrors.
    """
    tables = job.model_dump(mode="json", exclude_unset=True) if isinstance(job, Job) else dict(job)
    of = open_machine(machine) if isinstance(machine, str) else machine
    return make_plan(RawJob(tables, {}, "job").refuse_values(), ranks, per_node, of, memory, apart=True)


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
        yield f"{name:<{width}}" + "".join(f"{_gb(value):>12}" for value in values)


def _exchange_lines(plan: RankPlan) -> Iterator[str]:
    if not plan.exchanges:
        return
    yield f"rank {plan.rank} sends in a step"
    for one in sorted(plan.exchanges, key=lambda one: -one.sent):
        where = "inside a node" if one.inside_node else "between nodes"
        times = f"{one.calls} time{'s' if one.calls > 1 else ''}"
        yield f"  {_gb(one.sent)} GB in {one.operation} over {one.axis}, {one.ranks} ranks {where}, {times}"


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
        "peak_bytes": plan.peak,
        "at_peak_bytes": plan.at_peak,
        "start_bytes": plan.start,
        "flops": {dtype: number for dtype, number in flops.items() if number},
        "micro_batches": plan.micro_batches,
        "exchanges": [vars(one) | {"sent_bytes": one.sent} for one in plan.exchanges],
    }


def _gb(nbytes: float) -> str:
    """Gigabytes of 10^9 bytes, with three digits."""
    value = nbytes / 1e9
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"
