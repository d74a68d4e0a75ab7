"""The plugin `pipeline`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.api import (
    AppliedAxis,
    AxisTraits,
    Field,
    ModelSpec,
    Options,
    Parallelism,
    PipelineModel,
    PipelineSchedule,
    Plan,
    Problem,
    Runner,
    RunnerParts,
    UsageError,
    hookimpl,
)
from hpctrain_plugins.parallelism.pipeline.shared import SharedParameter, SharedParameters, find_shared
from hpctrain_plugins.parallelism.pipeline.stages import drop, split


class PipelineOptions(Options):
    schedule: str = Field(default="1f1b", description="the order of the forwards and backwards of the micro batches")
    stages_per_rank: int | None = Field(
        default=None, ge=1, description="pipeline stages on each rank; default: the fewest that the schedule allows"
    )
    split: list[int] = Field(default=[], description="blocks of each pipeline stage, such as [3, 5]; default: evenly")


class PipelineParallel(Parallelism):
    """Spreads the blocks over the ranks of the axis pp."""

    name = "pipeline"
    Options = PipelineOptions
    options: PipelineOptions
    chooses: ClassVar[Mapping[str, str]] = {"schedule": "pipeline_schedule"}

    def __init__(self, options: PipelineOptions, chosen: Mapping[str, PipelineSchedule]) -> None:
        super().__init__(options, chosen)
        self._schedule = chosen["schedule"]
        self._stages_per_rank = options.stages_per_rank or self._schedule.stages_per_rank[0]

    @property
    def traits(self) -> AxisTraits:
        return AxisTraits(
            "pp",
            10,
            "other parameters",
            interleaves=True,
            splits_backward=self._schedule.splits_backward,
            one_shape="always",  # torch's schedules allocate receive buffers once
        )

    def problems(self, plan: Plan) -> list[Problem]:
        named, size = f'schedule = "{self._schedule.name}"', plan.sizes[self.name]
        fewest, most = self._schedule.stages_per_rank
        problems: list[Problem] = []
        if self._stages_per_rank < fewest:
            why = f"{named} expects stages_per_rank of at least {fewest}, found {self._stages_per_rank}"
            problems.append(Problem(why))
        elif most is not None and self._stages_per_rank > most:
            why = (
                f"{named} has {most} stage{'s' * (most > 1)} per rank, found stages_per_rank = {self._stages_per_rank}"
            )
            problems.append(Problem(f'{why}; leave it out, or use "interleaved-1f1b"'))
        elif plan.outline is not None:  # else apply() reports it
            try:
                self._split(plan.outline, plan.model, size)
            except UsageError as error:
                problems.append(Problem.of(error))
        count = plan.micro_batches
        why_not = None if count is None else self._schedule.cannot_run(count, size, size * self._stages_per_rank)
        if why_not:
            made = f"{plan.tables['batch']['micro_size']} makes {count} micro batch{'es' * (count != 1)} per step"
            problems.append(Problem(f"{made}; pipeline: {named} {why_not}", "batch.micro_size"))
        if plan.compiles and self._schedule.splits_backward:
            why = f"pipeline: {named} splits backward in two, but compiled code has only one backward; use another schedule"
            problems.append(Problem(why, "compile.enabled"))
        return problems

    def _split(self, module: nn.Module, spec: ModelSpec, size: int) -> list[range]:
        """The block numbers of each pipeline stage. Raises UsageError if the model can't be cut like this."""
        blocks = spec.blocks(module)
        if not blocks or not isinstance(spec, PipelineModel) or not any(spec.ends(module)):
            raise UsageError(
                f"[parallelism] pipeline: the model {spec.name!r} does not say where it can be cut; expected an "
                "nn.Sequential with several blocks of one class in a row, or a model plugin that is a PipelineModel"
            )
        return split(len(blocks), size * self._stages_per_rank, self.options.split)

    def apply(self, module: nn.Module, spec: ModelSpec, mesh: DeviceMesh) -> AppliedPipeline:
        assert isinstance(spec, PipelineModel)  # _split raises otherwise
        blocks, (before, after) = spec.blocks(module), spec.ends(module)
        parts, size = self._split(module, spec, mesh.size()), mesh.size()
        ranks = [self._schedule.rank_of(stage, size) for stage in range(len(parts))]
        if any(ranks.count(rank) != self._stages_per_rank for rank in range(size)):
            raise UsageError(
                f"[parallelism.pipeline] schedule = {self._schedule.name!r}: its rank_of places {len(parts)} stages on the ranks "
                f"{ranks}, expected {self._stages_per_rank} on each rank from 0 to {size - 1}"
            )
        kept = [
            [blocks[i] for stage, part in enumerate(parts) if ranks[stage] == rank for i in part]
            for rank in range(size)
        ]
        kept[ranks[0]] += before
        kept[ranks[-1]] += after
        everything = [*before, *blocks, *after]
        dropped = [[one for one in everything if not any(one is other for other in own)] for own in kept]
        shared = find_shared(module, dropped)
        rank = mesh.get_local_rank()
        mine = {stage: [blocks[i] for i in part] for stage, part in enumerate(parts) if ranks[stage] == rank}
        drop(module, dropped[rank])
        return AppliedPipeline(module, self._schedule, mine, shared, mesh.get_group())


class AppliedPipeline(AppliedAxis):
    """This rank's pipeline stages, without the modules of other ranks."""

    def __init__(
        self,
        module: nn.Module,
        schedule: PipelineSchedule,
        stages: dict[int, list[nn.Module]],
        shared: list[SharedParameter],
        group: dist.ProcessGroup,
    ) -> None:
        """stages: the block numbers of each pipeline stage of this rank."""
        super().__init__(module)
        self._schedule, self._stages, self._group = schedule, stages, group
        self._shared = SharedParameters(module, shared, group)

    def runner(self, parts: RunnerParts) -> Runner:
        # imported here: every command loads every plugin, and torch's schedules import half of the compiler
        from hpctrain_plugins.parallelism.pipeline.runner import PipelineRunner

        return PipelineRunner(parts, self._group, self._schedule, self._stages, self._shared)


@hookimpl
def hpctrain_parallelism() -> list[type[Parallelism]]:
    return [PipelineParallel]
