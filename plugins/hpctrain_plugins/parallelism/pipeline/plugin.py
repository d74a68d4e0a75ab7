"""The plugin `pipeline`."""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist
from pydantic import model_validator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.api import (
    AppliedAxis,
    AxisTraits,
    Field,
    ModelSpec,
    Options,
    Parallelism,
    Plan,
    Problem,
    Runner,
    RunnerParts,
    UsageError,
    hookimpl,
)
from hpctrain_plugins.parallelism.pipeline.shared import Shared, SharedParameters, find_shared
from hpctrain_plugins.parallelism.pipeline.stages import drop, split


class PipelineOptions(Options):
    schedule: Literal["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble"] = Field(
        default="1f1b", description="in which order forwards and backwards of the micro batches take turns"
    )
    stages_per_rank: int = Field(
        default=1, ge=1, description="pipeline stages on each rank; more than 1 with interleaved-1f1b and zero-bubble"
    )
    split: list[int] = Field(default=[], description="blocks of each pipeline stage, such as [3, 5]; default: evenly")

    @model_validator(mode="after")
    def _stages_fit_schedule(self) -> PipelineOptions:
        if self.stages_per_rank > 1 and self.schedule in ("gpipe", "1f1b"):
            raise ValueError(f'schedule = "{self.schedule}" has 1 stage per rank; use "interleaved-1f1b"')
        if self.stages_per_rank == 1 and self.schedule == "interleaved-1f1b":
            raise ValueError('schedule = "interleaved-1f1b" expects stages_per_rank of at least 2')
        return self


class PipelineParallel(Parallelism):
    """Spreads the blocks over the ranks of the axis pp."""

    name = "pipeline"
    Options = PipelineOptions
    options: PipelineOptions

    @property
    def traits(self) -> AxisTraits:
        return AxisTraits(
            "pp",
            10,
            "other parameters",
            interleaves=True,
            splits_backward=self.options.schedule == "zero-bubble",
            one_shape="always",  # torch's schedules allocate what they receive once
        )

    def problems(self, plan: Plan) -> list[Problem]:
        size = plan.sizes[self.name]
        if plan.outline is not None:  # else apply() tells
            self._split(plan.outline, plan.model, size)
        problems = []
        if plan.micro_batches is not None and (why := self._cannot_run(plan.micro_batches, size)):
            count, micro_size = plan.micro_batches, plan.tables["batch"]["micro_size"]
            per_step = f"{micro_size} makes {count} micro batch{'es' * (count > 1)} per step"
            problems.append(Problem(f"{per_step}; pipeline: {why}", "batch.micro_size"))
        if plan.compiles and self.traits.splits_backward:
            why = (
                f'pipeline: schedule = "{self.options.schedule}" takes backward apart, and compiled code has it in one'
            )
            problems.append(Problem(f"{why}; use another schedule", "compile.enabled"))
        return problems

    def _cannot_run(self, count: int, size: int) -> str | None:
        """Why `size` ranks cannot run a step of `count` micro batches, in a sentence; None when they can."""
        schedule = self.options.schedule
        if schedule == "1f1b" and count < size:
            return (
                f'schedule = "1f1b" expects at least one for each of its {size} stages; use a smaller micro_size, or '
                'schedule = "gpipe"'
            )
        rounds = max(1, count // size)  # as torch's interleaved schedules cut a step
        if schedule in ("interleaved-1f1b", "zero-bubble") and count % rounds:
            return (
                f'schedule = "{schedule}" on {size} ranks cannot run that many in {rounds} equal rounds; expected a multiple of '
                f"{size}, such as {count - count % size}"
            )
        return None

    def _split(self, module: nn.Module, spec: ModelSpec, size: int) -> list[range]:
        """The blocks of each pipeline stage, by number; raises UsageError where the model can't be cut so."""
        blocks = spec.blocks(module)
        if not blocks or not any(spec.ends(module)):
            raise UsageError(
                f"[parallelism] pipeline: the model {spec.name!r} does not say where it can be cut; that takes an "
                "nn.Sequential with several blocks of one class in a row, or a model plugin with blocks, ends, embed and head",
                everywhere=True,
            )
        return split(len(blocks), size * self.options.stages_per_rank, self.options.split)

    def apply(self, module: nn.Module, spec: ModelSpec, mesh: DeviceMesh) -> AppliedPipeline:
        blocks, (before, after) = spec.blocks(module), spec.ends(module)
        stages = mesh.size() * self.options.stages_per_rank
        parts = self._split(module, spec, mesh.size())
        ranks = [range(rank, stages, mesh.size()) for rank in range(mesh.size())]
        kept = [[blocks[i] for stage in mine for i in parts[stage]] for mine in ranks]
        kept[0] += before
        kept[-1] += after
        everything = [*before, *blocks, *after]
        dropped = [[one for one in everything if not any(one is other for other in own)] for own in kept]
        shared = find_shared(module, dropped)
        rank = mesh.get_local_rank()
        mine = {stage: [blocks[i] for i in parts[stage]] for stage in ranks[rank]}
        drop(module, dropped[rank])
        return AppliedPipeline(module, self.options.schedule, mine, shared, mesh.get_group())


class AppliedPipeline(AppliedAxis):
    """This rank's pipeline stages; the other ranks' modules are gone."""

    def __init__(
        self,
        module: nn.Module,
        schedule: str,
        stages: dict[int, list[nn.Module]],
        shared: list[Shared],
        group: dist.ProcessGroup,
    ) -> None:
        """stages: the blocks of each of this rank's pipeline stages, by number."""
        super().__init__(module)
        self._schedule, self._stages, self._group = schedule, stages, group
        self._shared = SharedParameters(module, shared, group)

    def runner(self, parts: RunnerParts) -> Runner:
        # here, because every command loads every plugin, and torch's schedules bring half of the compiler with them
        from hpctrain_plugins.parallelism.pipeline.runner import PipelineRunner

        return PipelineRunner(parts, self._group, self._schedule, self._stages, self._shared)


@hookimpl
def hpctrain_parallelism() -> list[type[Parallelism]]:
    return [PipelineParallel]
