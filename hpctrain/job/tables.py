"""The tables of a job file and the keys of the core; all other keys in a slot's table are the plugin's options."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.config import JsonDict

from hpctrain.job.launching import LauncherTable
from hpctrain.job.table import (
    Seconds,
    SlotTable,
    Table,
    Variable,
    VariableValue,
    either,
    error_of_several_keys,
    excluded,
)
from hpctrain.job.watching import GuardTable, WatchdogTable


def _file_name(name: str) -> str:
    if not name or "/" in name or name in (".", ".."):
        raise ValueError("expected a name that can be a directory's, without '/'")
    return name


def _not_empty(path: object) -> object:
    if path == "":
        raise ValueError('expected a directory, "." for the current one')
    return path


def _permissions(text: str) -> str:
    if text != "umask" and not re.fullmatch("0?7[0-7]{2}", text):
        raise ValueError('expected an octal number as text that lets the owner in, such as "0750", or "umask"')
    return text


class JobTable(Table):
    """[job]"""

    model_config = ConfigDict(json_schema_extra=either(("steps",), ("epochs",)))

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

    start: Literal["fork", "spawn"] = "fork"
    """How `-n` starts ranks on this machine: as forks of a process that has made their imports, or each anew."""
    cpu_bind: Literal["auto", "none"] = "auto"
    """Whether the ranks of a node get cores of their own where the launcher has bound none: near their GPU, within a NUMA node."""
    time_limit: Seconds | None = None
    """The time that the job has from its start, such as "23h30m" or a number of seconds: before it is over, the job saves and
    exits with 75. The end of a Slurm job is known without it."""

    @property
    def mode(self) -> int:
        """`permissions` as a number."""
        return 0o777 if self.permissions == "umask" else int(self.permissions, 8)

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> JobTable:
        if (self.steps is None) == (self.epochs is None):
            found = "neither" if self.steps is None else "both; --set job.steps= or --set job.epochs= removes one"
            raise error_of_several_keys(f"expected either steps or epochs, found {found}")
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
    freeze: list[str] = []
    """Parameters that are not trained, as patterns such as "embedding.*"."""
    trainable: list[str] | None = Field(default=None, min_length=1)
    """Patterns of the only parameters that are trained; parameters in freeze are never trained."""
    loss: str | None = None
    """Loss of a module of your own: "package.module:callable", called as loss(outputs, target); a mean or a loss per sample."""


class DatasetTable(SlotTable):
    """[dataset]"""

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"properties": {"name": {"pattern": "^[^:]*$"}}, "required": ["name"]},
            "then": {"properties": excluded(("collate", "weights"), ("the name of a plugin",))},
        }
    )

    name: str
    """A dataset plugin, or "package.module:callable" called as callable(split=..., **options)."""
    seq_length: int | None = Field(default=None, ge=1)
    """Tokens per sample (default: the model's max_seq_length)."""
    workers: int | None = Field(default=None, ge=0, le=1024)
    """Processes that load samples; 0 loads on a thread of the rank (default: 0, or num_workers of a DataLoader of your own)."""
    start_method: Literal["spawn", "forkserver", "fork"] = "forkserver"
    """How worker processes start: from a process that has imported torch and has no MPI, anew, or as a copy of the rank, which
    shares its data but is undefined under MPI."""
    prefetch: int = Field(default=2, ge=1)
    """Micro batches to load ahead of the step."""
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

    pattern: str | Annotated[list[str], Field(min_length=1)]
    """The parameters of the group, such as "*.bias"; a parameter belongs to the first group that matches."""


_SCALING: JsonDict = {
    "if": {"properties": {"lr_scaling": {"enum": ["linear", "sqrt"]}}, "required": ["lr_scaling"]},
    "then": {"required": ["lr_reference_batch"]},
    "else": {"properties": {"lr_reference_batch": {"not": {"title": "lr_reference_batch without lr_scaling"}}}},
}


class OptimizerTable(SlotTable):
    """[optimizer]"""

    model_config = ConfigDict(json_schema_extra=_SCALING)

    name: str
    """An optimizer plugin, or "package.module:callable" called as callable(groups, **options)."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Largest global norm of the gradients."""
    groups: list[ParameterGroup] = []
    """Parameter groups with options of their own."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How lr grows with global_size (or tokens) / lr_reference_batch."""
    lr_reference_batch: int | None = Field(default=None, ge=1)
    """The global batch that lr was found with, in samples (or tokens)."""

    @model_validator(mode="after")
    def _scaling_needs_reference(self) -> OptimizerTable:
        if (self.lr_scaling != "none") != (self.lr_reference_batch is not None):
            raise error_of_several_keys(
                'expected lr_reference_batch together with lr_scaling = "linear" or "sqrt", found one alone'
            )
        return self


class ScheduleTable(SlotTable):
    """[schedule]"""

    name: str = "constant"
    """A schedule plugin, or "package.module:callable"."""


class BatchTable(Table):
    """[batch]"""

    model_config = ConfigDict(json_schema_extra=either(("global_size", "micro_size"), ("tokens", "micro_tokens")))

    global_size: int | None = Field(default=None, ge=1)
    """Samples per optimizer step, over all ranks."""
    micro_size: int | None = Field(default=None, ge=1)
    """Samples per forward on one rank."""
    tokens: int | None = Field(default=None, ge=1)
    """Instead of global_size: the most tokens per optimizer step, over all ranks, without padding."""
    micro_tokens: int | None = Field(default=None, ge=1)
    """Instead of micro_size: the most tokens per forward on one rank, padding included."""

    @model_validator(mode="after")
    def _samples_or_tokens(self) -> BatchTable:
        found = [key for key in BatchTable.model_fields if getattr(self, key) is not None]
        if found not in (["global_size", "micro_size"], ["tokens", "micro_tokens"]):
            raise error_of_several_keys(
                f"expected either global_size and micro_size or tokens and micro_tokens, found {', '.join(found) or 'none'}"
            )
        if self.tokens is not None and self.micro_tokens is not None and self.micro_tokens > self.tokens:
            raise error_of_several_keys(
                f"expected tokens >= micro_tokens, found tokens = {self.tokens} and micro_tokens = {self.micro_tokens}"
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


def _table_of(key: str, value: object) -> object:
    """A table in place of an integer that stands for one of its keys."""
    return {key: value} if isinstance(value, int) and not isinstance(value, bool) else value


class AxisTable(SlotTable):
    """[parallelism.NAME]"""

    size: int = Field(ge=1)
    """Ranks along this axis."""


class ShardingTable(SlotTable):
    """[sharding]"""

    model_config = ConfigDict(
        json_schema_extra={"if": {"required": ["name"]}, "then": {"properties": excluded(("stage",), ("name",))}}
    )

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
    buffer_dtype: Literal["fp64", "fp32", "bf16", "fp16"] | None = None
    """The dtype of the model's floating point buffers, such as rotary tables or running means (default: the model's own)."""


class ActivationCheckpointingTable(SlotTable):
    """[activation_checkpointing]"""

    mode: str = "none"
    """An activation checkpointing plugin."""


class CompileTable(Table):
    """[compile]"""

    enabled: bool = False
    """Run torch.compile on each block of the model."""


class CompressionTable(SlotTable):
    """[compression]"""

    name: str = "none"
    """A compression plugin: compresses gradients between data-parallel ranks."""


class KeepBestTable(Table):
    """[checkpoint] keep_best = { ... }"""

    count: int = Field(default=1, ge=1)
    """How many."""
    metric: str = "loss"
    """Measure that they go by: the loss, or the name of a metric that [[metric]] measures, as it stands behind "evaluation_"."""
    mode: Literal["min", "max"] = "min"
    """Whether the lowest or the highest is the best."""


KeepBest = Annotated[
    KeepBestTable, BeforeValidator(partial(_table_of, "count"), json_schema_input_type=int | KeepBestTable)
]


class CheckpointTable(SlotTable):
    """[checkpoint]"""

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


class CommunicatorTable(SlotTable):
    """[communicator]"""

    name: str = "auto"
    """A communicator plugin; auto takes the best one that is available."""
    timeout_seconds: float = Field(default=600, gt=0, le=1e8)
    """Time limit of every communication; then the job ends with the names of the missing ranks."""
    check: bool = False
    """Compare each collective between the ranks before data moves: operation, shapes and dtypes. A difference ends the job and
    names ranks, shapes and lines. Communication no longer overlaps with computation."""


class ElasticTable(Table):
    """[elastic]"""

    min_ranks: int = Field(ge=1)
    """The fewest ranks with which `hpctrain run --hostfile` goes on while slots are missing. The global batch stays."""


class LoggerTable(SlotTable):
    """[[logger]]"""

    name: str
    """A logger plugin."""


class HookTable(SlotTable):
    """[[hook]]"""

    name: str
    """A hook plugin."""


class MetricTable(SlotTable):
    """[[metric]]"""

    name: str
    """A metric plugin, or "package.module:callable"."""


class PluginsTable(Table):
    """[plugins]"""

    load: list[str] = []
    """Modules to load as plugins besides the installed ones."""
    block: list[str] = []
    """Entry points, modules or distributions not to load."""
    prefer: list[str] = []
    """Entry points, modules or distributions whose plugin is taken where several have one name."""


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
        str, Annotated[AxisTable, BeforeValidator(partial(_table_of, "size"), json_schema_input_type=int | AxisTable)]
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
    elastic: ElasticTable | None = None
    logger: list[LoggerTable] = []
    hook: list[HookTable] = []
    metric: list[MetricTable] = []
    launcher: dict[str, LauncherTable] = {}
    """Targets of `hpctrain submit`: a table for each target, such as [launcher.slurm]."""
    environment: dict[Variable, VariableValue] = Field(default={}, json_schema_extra={"additionalProperties": False})
    """Variables that each rank sets before MPI, torch and OpenMP start, such as FI_PROVIDER = "tcp"; one that the shell has set
    stays as it is."""
    plugins: PluginsTable = PluginsTable()

    @property
    def output_dir(self) -> Path:
        """The directory of the run's files."""
        return self.job.output_dir or Path("runs") / self.job.name
