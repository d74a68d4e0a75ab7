"""The tables of a job file and the keys of the core; all other keys in a slot's table are the plugin's options."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from hpctrain.job.table_types import (
    Duration,
    Seconds,
    SlotTable,
    Table,
    Variable,
    VariableValue,
    error_of_several_keys,
    of_file_system,
    seconds_of,
    table_of,
)


def _file_name(name: str) -> str:
    if not name or "/" in name or name in (".", ".."):
        raise ValueError("expected a name that can be a directory's, without '/'")
    return of_file_system(name)


def _not_empty(path: object) -> object:
    if path == "":  # pathlib would take it for the current directory
        raise ValueError('expected a directory, "." for the current one')
    return of_file_system(path) if isinstance(path, str) else path


def _permissions(text: str) -> str:
    if text != "umask" and not re.fullmatch("0?7[0-7]{2}", text):  # 7: the run itself has to write there
        raise ValueError('expected an octal number as text that lets the owner in, such as "0750", or "umask"')
    return text


class JobTable(Table):
    """[job]"""

    name: Annotated[str, AfterValidator(_file_name)]
    """The name of the run."""
    output_dir: Annotated[Path | None, BeforeValidator(_not_empty)] = None
    """Directory of the run's files, relative to the current directory (default: runs/NAME)."""
    permissions: Annotated[str, AfterValidator(_permissions)] = "0700"
    """Permissions of output_dir if hpctrain makes it, in octal, reduced by the umask; "umask": whatever the umask allows."""
    seed: int = Field(default=1234, ge=0, lt=2**63)
    """Determines initial weights, sample order and all random numbers."""
    steps: int | None = Field(default=None, ge=1)
    """The number of optimizer steps to train (or give epochs)."""
    epochs: float | None = Field(default=None, gt=0, le=1e9)
    """Train for this many passes over the data; whole global batches only."""
    deterministic: bool = False
    """Use only deterministic algorithms, for the same bits on the same hardware; an operation without one ends the job. On CPUs a
    job gives the same bits without this key."""
    start: Literal["fork", "spawn"] = "fork"
    """How `-n` starts ranks: as forks of its own process, which has imported torch, or as new processes."""
    cpu_bind: Literal["auto", "none"] = "auto"
    """Whether the ranks of a node get cores of their own, in the order of NUMA nodes, where the launcher has bound none."""
    time_limit: Seconds | None = None
    """Time limit of the job from its start, such as "23h30m" or a number of seconds; before it is over, the job saves and exits
    with 75. A Slurm job knows its end without this key."""

    @property
    def mode(self) -> int:
        """`permissions` as a number."""
        return 0o777 if self.permissions == "umask" else int(self.permissions, 8)  # mkdir takes the umask off

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> JobTable:
        if (self.steps is None) == (self.epochs is None):
            which = "neither" if self.steps is None else "both; --set job.steps= or --set job.epochs= removes one"
            raise error_of_several_keys(f"expected either steps or epochs, found {which}")
        return self


class ModelTable(SlotTable):
    """[model]"""

    name: str
    """A model plugin, or "package.module:callable" that returns a torch.nn.Module."""
    weights: Path | None = None
    """Start from these weights: a safetensors file (or the .safetensors.index.json of several), a directory that transformers'
    save_pretrained() made, a torch file, or a checkpoint's directory."""
    weights_strict: bool = True
    """Whether weights must have exactly the model's tensors; false: take those that fit by name and shape, and list the others."""
    sync_batch_norm: bool = False
    """Whether BatchNorms normalize over the micro batches of all data-parallel ranks, not of each."""
    freeze: list[str] = []
    """Parameters that are not trained, as patterns such as "embedding.*"."""
    trainable: list[str] | None = Field(default=None, min_length=1)
    """Patterns of the only parameters that are trained; parameters in freeze are never trained."""
    loss: str | None = None
    """Loss of a module of your own: "package.module:callable", called as loss(outputs, target); it returns a mean, or a loss per
    sample."""


class DatasetTable(SlotTable):
    """[dataset]"""

    name: str
    """A dataset plugin, or "package.module:callable" called as callable(split=..., **options)."""
    seq_length: int | None = Field(default=None, ge=1)
    """Tokens per sample (default: the model's max_seq_length)."""
    workers: int | None = Field(default=None, ge=0, le=1024)
    """Processes that load samples; 0 loads in the rank's process (default: 0, or num_workers of a DataLoader of your own)."""
    start_method: Literal["spawn", "forkserver", "fork"] = "forkserver"
    """How worker processes start: forkserver forks a process that has imported torch and has no MPI, spawn starts new ones, and
    fork copies the rank, which shares its data but is undefined under MPI."""
    prefetch: int = Field(default=2, ge=1)
    """Micro batches that each worker loads ahead of the step; without workers, a thread does unless the data draws numbers."""
    weights: str | None = None
    """Weights for data of your own: "package.module:callable", called with the data set; returns a weight for each training
    sample, by which samples are drawn with replacement (default: the data set's `sample_weights` if it has them, else none)."""
    collate: str | None = None
    """Collation of data of your own: "package.module:callable", called with a list of samples; returns the micro batch
    (default: the data set's `collate_fn` if it has one, else torch's default_collate)."""
    cache: Path | None = None
    """Directory for prepared data such as token ids (default: $XDG_CACHE_HOME/hpctrain or ~/.cache/hpctrain)."""


class ParameterGroup(SlotTable):
    """[[optimizer.groups]]: other options for some parameters."""

    pattern: str | Annotated[list[str], Field(min_length=1)] = "*"
    """The parameters of the group, such as "*.bias"; a parameter belongs to the first group that matches."""
    max_dims: int | None = Field(default=None, ge=0)
    """Only parameters with at most this many dimensions; those with 1 are biases and the weights of norms."""

    @model_validator(mode="after")
    def _chooses(self) -> ParameterGroup:
        if not self.model_fields_set & {"pattern", "max_dims"}:
            raise error_of_several_keys("expected pattern or max_dims, found neither")
        return self


class OptimizerTable(SlotTable):
    """[optimizer]"""

    name: str
    """An optimizer plugin, or "package.module:callable" called as callable(groups, **options)."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Largest global norm of the gradients."""
    groups: list[ParameterGroup] = []
    """Parameter groups with options of their own."""


class ScheduleTable(SlotTable):
    """[schedule]"""

    name: str = "constant"
    """A schedule plugin, or "package.module:callable"."""
    unit: Literal["step", "epoch"] = "step"
    """Count optimizer steps, or the epochs of [job] epochs, within which the rate is constant."""


class BatchTable(Table):
    """[batch]"""

    global_size: int | None = Field(default=None, ge=1)
    """Samples per optimizer step, over all ranks."""
    micro_size: int | None = Field(default=None, ge=1)
    """Samples per forward on one rank."""
    tokens: int | None = Field(default=None, ge=1)
    """Instead of global_size: the most tokens per optimizer step, over all ranks, without padding."""
    micro_tokens: int | None = Field(default=None, ge=1)
    """Instead of micro_size: the most tokens per forward on one rank, padding included."""
    packing: bool = False
    """Put the samples of a micro batch by tokens end to end in one row instead of padding them to one length; each attends only
    to itself."""
    drop_last: bool | None = None
    """End each epoch with its own samples where global batches don't divide it: true drops the rest, false makes a smaller batch of
    it, as torch's DataLoader does (default: the next epoch's samples fill it)."""
    channels_last: bool = False
    """Store images (batch, channels, height, width) with the channels last, as the convolutions of GPUs want them."""

    @model_validator(mode="after")
    def _samples_or_tokens(self) -> BatchTable:
        sizes = ("global_size", "micro_size", "tokens", "micro_tokens")
        keys = [key for key in sizes if getattr(self, key) is not None]
        if keys not in (["global_size", "micro_size"], ["tokens", "micro_tokens"]):
            raise error_of_several_keys(
                f"expected either global_size and micro_size or tokens and micro_tokens, found {', '.join(keys) or 'none'}"
            )
        if self.tokens is not None and self.micro_tokens is not None and self.micro_tokens > self.tokens:
            raise error_of_several_keys(
                f"expected tokens >= micro_tokens, found tokens = {self.tokens} and micro_tokens = {self.micro_tokens}"
            )
        if self.packing and self.tokens is None:
            raise error_of_several_keys(
                "expected packing with tokens and micro_tokens, found global_size and micro_size"
            )
        if self.drop_last is not None and self.tokens is not None:
            raise error_of_several_keys(
                "expected drop_last with global_size and micro_size, found tokens and micro_tokens"
            )
        return self

    @property
    def size(self) -> int:
        """Samples or tokens per optimizer step."""
        return self.global_size or self.tokens or 0


class EvaluationTable(Table):
    """[evaluation]"""

    every_steps: int = Field(default=0, ge=0)
    """Evaluate at this interval of steps and at the end; 0 is never."""
    every_epochs: float = Field(default=0, ge=0, le=1e9)
    """Evaluate at this interval of epochs, after the step that completes it, and at the end; 0 is never."""
    batches: int | None = Field(default=None, ge=1)
    """Global batches of the validation split to evaluate on (default: all of it)."""

    @property
    def enabled(self) -> bool:
        """Whether the job evaluates at all."""
        return bool(self.every_steps or self.every_epochs)


class MetricTable(SlotTable):
    """[[metric]]"""

    name: str
    """A metric plugin, or "package.module:callable"."""


class KeepBestTable(Table):
    """[checkpoint] keep_best = { ... }"""

    count: int = Field(default=1, ge=1)
    """How many checkpoints."""
    metric: str = "loss"
    """Measure that ranks them: the loss, or a value of a [[metric]], by its name after "evaluation_"."""
    mode: Literal["min", "max"] = "min"
    """Whether the lowest or the highest is the best."""


KeepBest = Annotated[
    KeepBestTable, BeforeValidator(partial(table_of, "count"), json_schema_input_type=int | KeepBestTable)
]


class CheckpointTable(SlotTable):
    """[checkpoint]: the core's keys; others are the format's options."""

    format: str = "hdf5"
    """A checkpoint format plugin."""
    every_steps: int = Field(default=0, ge=0)
    """Save at this interval of steps; 0 turns it off. The last step is always saved."""
    every_epochs: float = Field(default=0, ge=0, le=1e9)
    """Save at this interval of epochs, after the step that completes it; 0 turns it off."""
    keep: int | None = Field(default=None, ge=1)
    """How many of the newest checkpoints stay on disk (default: all, or 1 with keep_every or keep_best)."""
    keep_every: int | None = Field(default=None, ge=1)
    """Checkpoints whose step is a multiple of this also stay."""
    keep_best: KeepBest | None = None
    """The best of the evaluated checkpoints also stay; an integer is short for a table with `count`."""
    asynchronous: bool = False
    """Write in the background while training goes on; a save waits for the previous one."""
    on_error: Literal["stop", "continue"] = "stop"
    """Reaction to a save that fails: stop the job (exit 4), or continue with a warning until the next save."""


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

    @model_validator(mode="before")  # before: then a missing stage still differs from stage = 0
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


class LossSpikeTable(Table):
    """[guard] loss_spike = { ... }"""

    factor: float = Field(gt=1)
    """A loss is a spike if it is above this many times the median of the losses before it."""
    window: int = Field(default=50, ge=2, le=10_000)
    """Number of losses before it that the median is taken over; until there are this many, no loss is a spike."""
    action: Literal["stop", "skip", "rollback", "warn"] = "warn"
    """Reaction to a spike, before the update: as for non_finite, or a line on the screen."""


class GuardTable(Table):
    """[guard]"""

    non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """Reaction to a loss or gradient that is NaN or infinite (an overflow of fp16's loss scaling does not count): stop, leave
    the update out, or go back to the newest checkpoint and on with the samples that follow."""
    loss_spike: LossSpikeTable | None = None
    """Reaction to a loss far above the ones before it (default: none)."""
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
        return self.non_finite != "stop" or spike in ("skip", "rollback")


class WatchdogTable(Table):
    """[watchdog]"""

    timeout_seconds: float | None = Field(default=None, gt=0, le=1e8)
    """Seconds that a phase of training may take, or a rank may be silent; then the job ends (exit 4) and says which rank waits
    where (default: 0.9 of timeout_seconds of [communicator])."""


class ProfileTable(SlotTable):
    """[profile]"""

    name: str = "torch"
    """A profiler plugin."""


class SchedulerTable(SlotTable):
    """[scheduler.NAME]"""

    nodes: int = Field(default=1, ge=1)
    """Nodes to ask for."""
    ranks_per_node: int = Field(default=1, ge=1)
    """Ranks on each node: one per GPU, or without GPUs one per socket or per few cores."""
    cpus_per_rank: int | None = Field(default=None, ge=1)
    """Cores of each rank (default: the site's)."""
    time: Duration | None = None
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


class LoggerTable(SlotTable):
    """[[logger]]"""

    name: str
    """A logger plugin."""


class HookTable(SlotTable):
    """[[hook]]"""

    name: str
    """A hook plugin."""


class PluginsTable(Table):
    """[plugins]"""

    load: list[str] = []
    """Modules to load as plugins besides the installed ones."""
    block: list[str] = []
    """Entry points, modules or distributions not to load."""


class Job(Table):
    """A job. `hpctrain.load_job` reads it from a file; `Job.model_validate` makes it from a dict."""

    job: JobTable
    model: ModelTable
    dataset: DatasetTable
    optimizer: OptimizerTable
    schedule: ScheduleTable = ScheduleTable()
    batch: BatchTable
    evaluation: EvaluationTable = EvaluationTable()
    parallelism: dict[
        str, Annotated[AxisTable, BeforeValidator(partial(table_of, "size"), json_schema_input_type=int | AxisTable)]
    ] = {}
    """Mesh axes: an integer is short for a table with `size`. The remaining ranks are data-parallel."""
    sharding: ShardingTable = ShardingTable()
    precision: PrecisionTable = PrecisionTable()
    activation_checkpointing: ActivationCheckpointingTable = ActivationCheckpointingTable()
    compile: CompileTable = CompileTable()
    compression: CompressionTable = CompressionTable()
    checkpoint: CheckpointTable = CheckpointTable()
    guard: GuardTable = GuardTable()
    communicator: CommunicatorTable = CommunicatorTable()
    watchdog: WatchdogTable = WatchdogTable()
    profile: ProfileTable = ProfileTable()
    logger: list[LoggerTable] = []
    hook: list[HookTable] = []
    metric: list[MetricTable] = []
    scheduler: dict[str, SchedulerTable] = {}
    """Targets of `hpctrain submit`: a table for each target, such as [scheduler.slurm]."""
    environment: dict[Variable, VariableValue] = Field(default={}, json_schema_extra={"additionalProperties": False})
    """Variables that each rank sets before MPI, torch and OpenMP start, such as FI_PROVIDER = "tcp"; one that the shell has set
    stays as it is."""
    plugins: PluginsTable = PluginsTable()

    @property
    def scheduled_epochs(self) -> int | None:
        """The length of a schedule that counts epochs; None for one that counts steps."""
        return math.ceil(self.job.epochs or 0) if self.schedule.unit == "epoch" else None

    @property
    def output_dir(self) -> Path:
        """The directory of the run's files."""
        return self.job.output_dir or Path("runs") / self.job.name
