"""Plans a job on hardware: memory, communication and computing of a step."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from hpctrain.base.errors import UsageError
from hpctrain.checking.check import CheckedJob
from hpctrain.checking.resolved import resolved_tables
from hpctrain.job.raw import RawJob
from hpctrain.job.tables import Job
from hpctrain.model.mesh import layout_of
from hpctrain_tools.full_check import check_thoroughly
from hpctrain_tools.plan.estimate import step_time
from hpctrain_tools.plan.fresh import plan_ranks_apart
from hpctrain_tools.plan.job_plan import JobPlan
from hpctrain_tools.plan.machines import Machine, open_machine
from hpctrain_tools.plan.processes import plan_ranks
from hpctrain_tools.plan.rank_plan import RankPlan

# the tables that memory depends on
_OF_MEMORY = (
    "model", "dataset", "batch", "optimizer", "precision", "parallelism", "sharding", "activation_checkpointing",
)  # fmt: skip
# ranks of a node where nobody says it
_PER_NODE = 8


@dataclass(frozen=True)
class Hardware:
    """The ranks on which a job is to run. per_node: of a node. memory: bytes of a device; None if that is not known. machine: None
    where no time is asked for."""

    ranks: int
    per_node: int
    memory: float | None
    machine: Machine | None

    @staticmethod
    def of(ranks: int, per_node: int | None, memory: float | None, machine: Machine | None) -> Hardware:
        """Take what is not given from the machine. Raises UsageError for a number that is not positive."""
        for name, value in (("ranks", ranks), ("ranks of a node", per_node), ("memory", memory)):
            if value is not None and value <= 0:
                raise UsageError(f"{name}: found {value:g}, expected more than 0")
        if machine is not None:
            of_device = machine.memory if memory is None else memory
            return Hardware(ranks, per_node or machine.per_node, of_device, machine)
        return Hardware(ranks, per_node or _PER_NODE, memory, None)

    @property
    def on_cpu(self) -> bool:
        """Whether the ranks compute on CPUs."""
        return self.machine is not None and not self.machine.accelerator


def make_plan(raw: RawJob, hardware: Hardware, apart: bool = False) -> JobPlan:
    """Plan the job. apart: in a new process of Python, needed where this one may have differentiated before.

    Raises the errors of `hpctrain check`, and EnvironmentUnfitError where a plugin needs the values of tensors.
    """
    if dist.is_initialized():
        raise UsageError(
            "a plan sets torch.distributed up itself, but it is set up already; plan before, or in another process"
        )
    raw = planned_job(raw, hardware.machine)
    checked, _ = check_thoroughly(raw, hardware.ranks)
    if apart and not hardware.on_cpu:
        return told_plan(checked, hardware, plan_ranks_apart(raw, hardware.ranks, hardware.per_node))
    return plan_checked(checked, hardware)


def plan_checked(checked: CheckedJob, hardware: Hardware, quick: bool = False) -> JobPlan:
    """Plan a job that `planned_job` has made and that was checked. quick: see plan_rank."""
    return told_plan(checked, hardware, plan_ranks(checked, hardware.ranks, hardware.per_node, hardware.on_cpu, quick))


def told_plan(checked: CheckedJob, hardware: Hardware, ranks: list[RankPlan]) -> JobPlan:
    """The plan of the job from those of its ranks."""
    job, time = checked.job, None
    if hardware.machine is not None:
        data_axes = layout_of(job, checked.parts, hardware.ranks).data_axes
        time = step_time(ranks, hardware.machine, data_axes, job.precision.mode == "tf32")
    left_out = list(_left_out(checked, ranks))
    tables = resolved_tables(checked)
    return JobPlan(
        checked.parts.sharding.name,
        job.precision.mode,
        ranks,
        hardware.ranks,
        hardware.per_node,
        hardware.memory,
        time,
        left_out,
        {name: tables[name] for name in _OF_MEMORY if name in tables},
    )


def planned_job(raw: RawJob, machine: Machine | None) -> RawJob:
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
        yield "[compression]: planned without; less is sent"
    if any(one.uneven for one in ranks):
        yield (
            "micro batches of a step have different shapes: the largest ones were planned, so it computes and sends less than is "
            "told here"
        )
    guesses = max(one.guesses for one in ranks)
    if guesses and len(ranks) == 1:
        yield (
            f"an integer or a truth value was asked of tensors {guesses} times, and 0 or False was the answer: if shapes depend on "
            "it, the plan is wrong"
        )


def plan(
    job: Job | Mapping[str, object],
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
    raw = RawJob(tables, {}, "job").refuse_values()
    return make_plan(raw, Hardware.of(ranks, per_node, memory, of), apart=True)
