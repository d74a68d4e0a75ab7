"""Makes the plan of a job: the data that plugins check."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from hpctrain.contracts.plan import Plan
from hpctrain.job.parts import Parts
from hpctrain.job.tables import Job
from hpctrain.model.mesh import Layout


def plan_of(job: Job, parts: Parts, outline: nn.Module | None, layout: Layout | None) -> Plan:
    """The plan. layout: None if the number of ranks is unknown, or if the axes don't fit it."""
    plan = Plan(
        tables=job.model_dump(),
        model=parts.model,
        outline=outline,
        parallelism=parts.parallelism,
        sizes={name: job.parallelism[name].size for name in parts.parallelism},
        sharding=parts.sharding,
        activation_checkpointing=parts.activation_checkpointing,
    )
    if layout is None:
        return plan
    return replace(
        plan,
        axes=layout.axes,
        model_axes=layout.model_axes,
        data_axes=layout.data_axes,
        data_ranks=layout.data_ranks,
        micro_batches=_micro_batches(job, layout),
    )


def _micro_batches(job: Job, layout: Layout) -> int | None:
    size, micro_size = job.batch.global_size, job.batch.micro_size
    if size is None or micro_size is None or size % (layout.data_ranks * micro_size):
        return None
    return size // (layout.data_ranks * micro_size)
