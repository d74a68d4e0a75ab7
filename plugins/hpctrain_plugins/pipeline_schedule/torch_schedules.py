"""The schedules of torch.distributed.pipelining."""

from __future__ import annotations

from typing import Any

from hpctrain.api import PipelineSchedule, hookimpl


class GPipe(PipelineSchedule):
    """All forwards, then all backwards (Huang et al., "GPipe", 2019)."""

    name = "gpipe"

    def torch_class(self) -> Any:
        from torch.distributed.pipelining import ScheduleGPipe

        return ScheduleGPipe


class OneForwardOneBackward(PipelineSchedule):
    """Forwards and backwards in turn, which keeps fewer activations (Narayanan et al., "PipeDream", 2019)."""

    name = "1f1b"

    def torch_class(self) -> Any:
        from torch.distributed.pipelining import Schedule1F1B

        return Schedule1F1B

    def cannot_run(self, micro_batches: int, ranks: int, stages: int) -> str | None:
        if micro_batches >= stages:
            return None
        return f'expects at least one for each of its {stages} stages; use a smaller micro_size, or schedule = "gpipe"'


class Interleaved(PipelineSchedule):
    """1f1b with several stages on each rank: a smaller bubble, more messages (Narayanan et al., 2021)."""

    name = "interleaved-1f1b"
    stages_per_rank = (2, None)

    def torch_class(self) -> Any:
        from torch.distributed.pipelining import ScheduleInterleaved1F1B

        return ScheduleInterleaved1F1B

    def cannot_run(self, micro_batches: int, ranks: int, stages: int) -> str | None:
        rounds = max(1, micro_batches // ranks)  # as in torch's interleaved schedules
        if micro_batches % rounds == 0:
            return None
        return (
            f"on {ranks} ranks cannot run that many in {rounds} equal rounds; expected a multiple of {ranks}, such as "
            f"{micro_batches - micro_batches % ranks}"
        )


class ZeroBubble(Interleaved):
    """Backward for parameters fills the bubble (Qi et al., "Zero Bubble Pipeline Parallelism", 2023)."""

    name = "zero-bubble"
    stages_per_rank = (1, None)
    splits_backward = True

    def torch_class(self) -> Any:
        from torch.distributed.pipelining import ScheduleInterleavedZeroBubble

        return ScheduleInterleavedZeroBubble


class VShaped(PipelineSchedule):
    """Two stages on each rank, in a V: the first rank has the first stage and the last."""

    stages_per_rank = (2, 2)
    splits_backward = True

    def rank_of(self, stage: int, ranks: int) -> int:
        return stage if stage < ranks else 2 * ranks - 1 - stage


class ZBV(VShaped):
    """Zero bubble in a V (Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 6)."""

    name = "zbv"

    def torch_class(self) -> Any:
        from torch.distributed.pipelining import ScheduleZBVZeroBubble

        return ScheduleZBVZeroBubble


class DualPipeV(VShaped):
    """Forwards and backwards of different micro batches side by side (DeepSeek-AI, "DeepSeek-V3", 2024; here in a V)."""

    name = "dualpipe-v"

    def torch_class(self) -> Any:
        from torch.distributed.pipelining import ScheduleDualPipeV

        return ScheduleDualPipeV

    def cannot_run(self, micro_batches: int, ranks: int, stages: int) -> str | None:
        if micro_batches >= stages:
            return None
        return f'expects at least one for each of its {stages} stages; use a smaller micro_size, or schedule = "zbv"'


@hookimpl
def hpctrain_pipeline_schedule() -> list[type[PipelineSchedule]]:
    return [GPipe, OneForwardOneBackward, Interleaved, ZeroBubble, ZBV, DualPipeV]
