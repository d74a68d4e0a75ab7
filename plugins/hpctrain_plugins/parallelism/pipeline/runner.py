"""Runs a step's micro batches through the pipeline, with torch's schedules."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from hpctrain.api import MicroBatch, PipelineModel, PipelineSchedule, Runner, RunnerParts, See, UsageError
from hpctrain_plugins.parallelism.pipeline.passing import receive, send
from hpctrain_plugins.parallelism.pipeline.shared import SharedParameters
from hpctrain_plugins.parallelism.pipeline.stages import PipelineStage
from hpctrain_plugins.parallelism.pipeline.stopwatch import Stopwatch, TimedStage


class PipelineRunner(Runner):
    """Runs this rank's pipeline stages. Only the rank of the last stage has losses."""

    def __init__(
        self,
        parts: RunnerParts,
        group: dist.ProcessGroup,
        schedule: PipelineSchedule,
        stages: dict[int, list[nn.Module]],
        shared: SharedParameters,
    ) -> None:
        """stages: the block numbers of each pipeline stage of this rank. shared: parameters that other ranks need, too."""
        self._parts, self._group, self._record, self._shared = parts, group, schedule, shared
        self._count = len(stages) * group.size()
        spec = parts.spec
        assert isinstance(spec, PipelineModel)  # the axis is applied only to such models
        self._stages = {
            number: PipelineStage(
                parts.module, spec, parts.precision, parts.device, blocks, number == 0, number == self._count - 1
            )
            for number, blocks in stages.items()
        }
        shared.place(parts.device)
        for stage in self._stages.values():
            stage.copies.extend(shared.copies_of(stage))
        self._schedule: Any = None
        self._micro_batches = 0
        self._step = 0
        self._watch = Stopwatch(parts.device, lambda name: parts.phase(name, self._step))
        self._is_set_up = False
        self._divisor: float | Tensor = 1
        self._total = torch.zeros((), dtype=torch.float64, device=parts.device)

    def train(self, micro_batches: list[MicroBatch], divisor: float | Tensor, step: int) -> Tensor:
        parts = self._parts
        parts.module.train()
        self._divisor, self._step, self._has_forwarded = divisor, step, False
        self._give(micro_batches)
        self._is_set_up = self._micro_batches == len(micro_batches)
        if not self._is_set_up:
            self._micro_batches, self._schedule = len(micro_batches), self._make_schedule(len(micro_batches))
        parts.sharded.begin(last=True, interleaved=True)
        parts.seed_draws(step, micro_batches[0], min(self._stages))
        index = torch.arange(len(micro_batches))  # on the host: a schedule asks for each number
        first = [index] if 0 in self._stages else []
        target = index if self._count - 1 in self._stages else None
        losses: list[Tensor] = []
        self._watch.restart()
        sent = self._shared.spread()
        with parts.context():
            self._schedule.step(*first, target=target, losses=losses, return_outputs=False, index=index)
        self._watch.stop()
        for work in sent:
            work.wait()
        self._shared.gather_gradients()
        self._give([])
        scale = parts.scaler.scale / divisor
        return sum((loss.detach().double() / scale for loss in losses), torch.zeros_like(self._total))

    def _make_schedule(self, micro_batches: int) -> Any:
        stages = [
            TimedStage(stage, number, self._count, self._parts.device, group=self._group)
            for number, stage in self._stages.items()
        ]
        for stage in stages:
            stage.watch, stage.forwarded = self._watch, self._forwarded
        schedule = self._record.torch_class()
        of = stages[0] if issubclass(schedule, PipelineScheduleSingle) else stages
        made = schedule(of, micro_batches, loss_fn=self._loss, scale_grads=False)
        placed = stages[0].stage_index_to_group_rank
        if any(rank != self._rank_of(stage) for stage, rank in placed.items()):
            raise UsageError(
                f"[parallelism.pipeline] schedule = {self._record.name!r}: {schedule.__name__} places the stages on the ranks "
                f"{list(placed.values())}, and rank_of on {[self._rank_of(stage) for stage in placed]}; expected the same"
            )
        return made

    def _forwarded(self, number: int) -> None:
        self._has_forwarded = True
        self._parts.forwarded(self._step, self._outputs, self._given[number].batch)

    @property
    def _outputs(self) -> Any:
        """The model's outputs for the newest micro batch, on the last stage's rank; torch's schedules give a tensor of them."""
        return self._stages[self._count - 1].outputs

    def _loss(self, _: Tensor, index: Tensor) -> Tensor:
        """The loss of the newest micro batch: a schedule asks for it right after the forward."""
        parts, outputs = self._parts, self._outputs
        micro = self._given[int(index)]
        if not self._has_forwarded:  # torch runs one forward for shapes
            micro = replace(micro, counts=False)
        with self._watch.computing(), parts.precision.forward(parts.device):
            loss = parts.loss(outputs, micro)
        return parts.backward_from(loss, self._divisor)

    def figures(self) -> tuple[float, float]:
        """This rank's seconds of computation, and the seconds of the step."""
        # a schedule's first step also exchanges shapes, so its time says nothing
        return self._watch.seconds() if self._is_set_up else (math.nan, math.nan)

    def metrics(self, figures: Tensor) -> tuple[dict[str, float], str]:
        busy, taken = figures.T
        bubble = 1 - (busy.mean() / taken.max()).item()  # faster ranks wait for the slowest one
        return ({"pipeline_bubble": bubble}, f"bubble {bubble:.0%}") if math.isfinite(bubble) else ({}, "")

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[MicroBatch], see: See) -> tuple[Tensor, int]:
        parts = self._parts
        parts.module.eval()
        total, count = torch.zeros_like(self._total), 0
        for work in self._shared.spread():
            work.wait()
        for micro in micro_batches:
            self._give([micro])
            with parts.context():
                outputs = self._forward()
                if self._count - 1 in self._stages and micro.counts:
                    with parts.precision.forward(parts.device):
                        total += parts.loss(outputs, micro)
                        see(outputs, micro.batch)
                    count += micro.terms
        self._give([])
        return total, count

    def _forward(self) -> Any:
        """Run one micro batch through all stages; return the model's outputs on the rank of the last stage."""
        index = torch.zeros(1, dtype=torch.int64)
        value = index
        for number, stage in self._stages.items():
            if number > 0 and (before := self._rank_of(number - 1)) != self._group.rank():
                value = receive(before, self._group, self._parts.device)
            value = stage(value, index)
            if number < self._count - 1 and (after := self._rank_of(number + 1)) != self._group.rank():
                send(value, after, self._group)
        return self._outputs if self._count - 1 in self._stages else value

    def _rank_of(self, stage: int) -> int:
        return self._record.rank_of(stage, self._group.size())

    def _give(self, micro_batches: list[MicroBatch]) -> None:
        self._given = micro_batches
        for stage in self._stages.values():
            stage.micro_batches, stage.outputs = micro_batches, None

    def idle_share(self, micro_batches: int) -> float:
        """The bubble: a rank waits before its first and after its last micro batch (Narayanan et al., "Efficient Large-Scale
        Language Model Training on GPU Clusters", 2021, section 2.2). A schedule that splits backward waits less."""
        ranks, per_rank = self._group.size(), len(self._stages)
        return (ranks - 1) / (per_rank * micro_batches + ranks - 1)

    def describe(self, micro_batches: int) -> str:
        bubble = self.idle_share(micro_batches)
        at_most = "at most " if self._record.splits_backward else ""
        return f"{self._record.name}, {self._count} stages, {micro_batches} micro batches, bubble {at_most}{bubble:.0%} of a step"
