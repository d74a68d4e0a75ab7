"""The tables of a job file that say how its ranks train: parallelism, sharding, precision, communication, guards, schedulers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from hpctrain.job.table_types import SlotTable, Table, error_of_several_keys, seconds_of


class AxisTable(SlotTable):
    """[parallelism.NAME]"""

    size: int = Field(ge=1)
    """Ranks along this axis."""


class ShardingTable(SlotTable):
    """[sharding]"""

    name: str | None = None
    """A sharding plugin."""
    stage: int | None = Field(default=None, ge=0)
    """Short for name = "zero-N" (ZeRO). The data-parallel ranks shard: 0 nothing, 1 optimizer state, 2 also gradients, 3
    also parameters. The default is stage 0."""

    @model_validator(mode="before")
    @classmethod
    def _one_of_both(cls, table: Any) -> Any:
        if isinstance(table, dict) and "name" in table and "stage" in table:
            raise ValueError("name and stage both choose the strategy; keep one of them")
        return {**table, "stage": 0} if isinstance(table, dict) and not {"name", "stage"} & table.keys() else table

    @property
    def choice(self) -> tuple[str, str]:
        """The key that chose the strategy, and its value as written in a job file."""
        return ("name", repr(self.name)) if self.stage is None else ("stage", str(self.stage))


class PrecisionTable(SlotTable):
    """[precision]"""

    mode: str = "auto"
    """A precision plugin; auto takes bf16 on GPUs that have it and fp32 elsewhere."""


class ActivationCheckpointingTable(SlotTable):
    """[activation_checkpointing]"""

    mode: str = "none"
    """An activation checkpointing plugin."""


class CompileTable(Table):
    """[compile]"""

    enabled: bool = False
    """Run torch.compile on each block of the model, and on its loss where the output is one tensor."""

    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """torch.compile's mode: the second tries several kernels for each product, which takes minutes at the first start."""


class CompressionTable(SlotTable):
    """[compression]"""

    name: str = "none"
    """A compression plugin: compresses gradients between data-parallel ranks."""


class CommunicatorTable(SlotTable):
    """[communicator]"""

    name: str = "auto"
    """A communicator plugin; auto takes the best one that every rank can use."""
    device: Literal["auto", "accelerator", "cpu"] = "auto"
    """The device of the ranks: auto takes accelerators where each rank can have one of its own, and warns where it leaves some
    unused; "accelerator" refuses instead; "cpu" leaves them alone."""
    timeout_seconds: float = Field(default=600, gt=0, le=1e8)
    """Time limit of every communication; then the job ends with the names of the missing ranks. With [compile] an hour by default,
    for the first step; the watchdog keeps to its own limit afterwards."""
    check: bool = False
    """Compare each collective between the ranks before data moves: operation, shapes and dtypes. A difference ends the job and
    names ranks, shapes and lines. Communication no longer overlaps with computation."""


class ElasticTable(Table):
    """[elastic]"""

    min_ranks: int = Field(ge=1)
    """The fewest ranks with which `hpctrain run --hostfile` goes on while slots are missing. The global batch stays."""


class LossSpikeTable(Table):
    """[guard] loss_spike = { ... }"""

    factor: float = Field(gt=1)
    """A loss is a spike if it is above this many times the median of the losses before it."""
    window: int = Field(default=50, ge=2, le=10_000)
    """How many losses the median is of; until there are as many, no loss is a spike."""
    action: Literal["stop", "skip", "rollback", "warn"] = "warn"
    """Reaction to a spike, before the update: as for non_finite, or a line on the screen."""


class GuardTable(Table):
    """[guard]"""

    non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """Reaction to a loss or gradient that is NaN or infinite (an overflow of fp16's loss scaling does not count): stop, leave
    the update out, or go back to the newest checkpoint and on with the samples that follow."""
    loss_spike: LossSpikeTable | None = None
    """Reaction to a loss far above the ones before it (default: none)."""
    oom: Literal["stop", "skip"] = "stop"
    """Reaction to a rank that runs out of memory in forward or backward: stop, or leave the update out on all ranks."""
    replica_check_every: int = Field(default=0, ge=0)
    """Interval in steps at which ranks that hold the same parameters compare them, and stop if they differ; 0 is never."""
    limit: int = Field(default=10, ge=1)
    """The most steps in a row to leave out, and the most rollbacks to one checkpoint; the next one stops the job."""

    @property
    def rolls_back(self) -> bool:
        """Whether any guard may go back to a checkpoint."""
        return "rollback" in (self.non_finite, self.loss_spike.action if self.loss_spike else None)

    @property
    def may_leave_out(self) -> bool:
        """Whether any guard may leave the update of a step out and train on."""
        spike = self.loss_spike.action if self.loss_spike else "warn"
        return self.non_finite != "stop" or spike in ("skip", "rollback") or self.oom == "skip"


class WatchdogTable(Table):
    """[watchdog]"""

    timeout_seconds: float | None = Field(default=None, gt=0, le=1e8)
    """Seconds that a phase of training may take, or a rank may be silent; then the job ends (exit 4) and says which rank waits
    where (default: 0.9 of timeout_seconds of [communicator])."""


class ProfileTable(SlotTable):
    """[profile]"""

    name: str = "torch"
    """A profiler plugin."""


def _time(text: str) -> str:
    seconds_of(text)
    return text


class SchedulerTable(SlotTable):
    """[scheduler.NAME]"""

    nodes: int = Field(default=1, ge=1)
    """Nodes to ask for."""
    ranks_per_node: int = Field(default=1, ge=1)
    """Ranks on each node: one per GPU, or without GPUs one per socket or per few cores."""
    cpus_per_rank: int | None = Field(default=None, ge=1)
    """Cores of each rank (default: the site's)."""
    time: Annotated[str, AfterValidator(_time)] | None = None
    """Time limit of one start of the job, such as "24h", or as in Slurm "90" (minutes) or "1-12:00:00" (default: the site's)."""
    save_seconds: int = Field(default=120, ge=1)
    """How long before the time limit the ranks are told to finish their step and save."""

    @property
    def seconds(self) -> int | None:
        """`time` in seconds."""
        return None if self.time is None else seconds_of(self.time)

    @model_validator(mode="after")
    def _leaves_time_to_train(self) -> SchedulerTable:
        if self.seconds is not None and self.seconds <= self.save_seconds:
            raise error_of_several_keys(
                f"expected time > save_seconds, found time = {self.time} and save_seconds = {self.save_seconds}"
            )
        return self
