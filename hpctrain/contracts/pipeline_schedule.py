"""The slot `pipeline_schedule`: in which order a pipeline's stages run forwards and backwards of a step's micro batches."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from hpctrain.contracts.plugin import Plugin


class PipelineSchedule(Plugin):
    """A record of one schedule. `[parallelism.pipeline] schedule = NAME` chooses it; it takes no options."""

    stages_per_rank: ClassVar[tuple[int, int | None]] = (1, 1)
    """The fewest pipeline stages that a rank may have, and the most; None is any number."""

    splits_backward: ClassVar[bool] = False
    """Whether backward comes in two: one for a stage's input, one for its parameters."""

    @abstractmethod
    def torch_class(self) -> Any:
        """A schedule class of torch.distributed.pipelining, or one with the same constructor and `step`.

        Import it in this method: torch's schedules bring half of its compiler with them.
        """

    def rank_of(self, stage: int, ranks: int) -> int:
        """The rank of the pipeline that has the stage; `torch_class` must place stages in the same way."""
        return stage % ranks

    def cannot_run(self, micro_batches: int, ranks: int, stages: int) -> str | None:
        """Why a step of `micro_batches` cannot be run, as the end of a sentence; None when it can."""
        return None
