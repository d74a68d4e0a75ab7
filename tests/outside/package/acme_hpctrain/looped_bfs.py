"""A pipeline schedule: all micro batches through one stage, then through the next."""

from __future__ import annotations

from hpctrain.api import PipelineSchedule, hookimpl


class LoopedBFS(PipelineSchedule):
    """Breadth-first pipeline parallelism (Lamy-Poirier, 2022)."""

    name = "looped-bfs"
    stages_per_rank = (2, None)

    def torch_class(self):
        from torch.distributed.pipelining import ScheduleLoopedBFS

        return ScheduleLoopedBFS


@hookimpl
def hpctrain_pipeline_schedule():
    return [LoopedBFS]
