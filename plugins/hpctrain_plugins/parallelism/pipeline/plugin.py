"""The plugin `pipeline`."""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist
from pydantic import model_validator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.api import AxisTraits, Field, ModelSpec, Options, Parallelism, Runner, RunnerParts, UsageError, hookimpl
from hpctrain_plugins.parallelism.pipeline.shared import SharedParameters, find_shared
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


class Pipeline(Parallelism):
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
            splits_backward=self.options.schedule == "zero-bubble",
            one_shape="always",  # torch's schedules allocate what they receive once
        )

    def refuse(self, spec: ModelSpec, size: int) -> str | None:
        if spec.outline is not None:  # else apply() tells
            self._split(spec.outline, spec, size)
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

    def refuse_micro_batches(self, count: int, size: int) -> str | None:
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

    def refuse_compile(self, whole: bool) -> str | None:
        if self.options.schedule == "zero-bubble":
            return (
                'schedule = "zero-bubble" takes backward apart, and compiled code has it in one; use another schedule'
            )
        return None

    def apply(self, module: nn.Module, spec: ModelSpec, mesh: DeviceMesh) -> nn.Module:
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
        self._group: dist.ProcessGroup = mesh.get_group()
        self._stages = {stage: [blocks[i] for i in parts[stage]] for stage in ranks[rank]}
        drop(module, dropped[rank])
        self._shared = SharedParameters(module, shared, self._group)
        return module

    def runner(self, parts: RunnerParts) -> Runner:
        # here, because every command loads every plugin, and torch's schedules bring half of the compiler with them
        from hpctrain_plugins.parallelism.pipeline.runner import PipelineRunner

        return PipelineRunner(parts, self._group, self.options.schedule, self._stages, self._shared)


@hookimpl
def hpctrain_parallelism() -> list[type[Parallelism]]:
    return [Pipeline]
