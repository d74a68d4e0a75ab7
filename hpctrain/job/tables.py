"""The tables of a job file and the keys that the core itself reads; a slot's other keys are its plugin's options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class Table(BaseModel):
    """A table that holds nothing but its own keys."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class SlotTable(Table):
    """A table that chooses a plugin; keys that are not declared here go to the plugin."""

    model_config = ConfigDict(extra="allow")

    @property
    def options(self) -> dict[str, Any]:
        """The plugin's keys as written."""
        return dict(self.model_extra or {})


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

    name: Annotated[str, AfterValidator(_file_name)]
    """What the run is called."""
    output_dir: Annotated[Path | None, BeforeValidator(_not_empty)] = None
    """Where the files of the run go, relative to the current directory (default: runs/NAME)."""
    permissions: Annotated[str, AfterValidator(_permissions)] = "0700"
    """Who may enter output_dir where hpctrain makes it, in octal, less what the umask takes; "umask": what that leaves."""
    seed: int = Field(default=1234, ge=0, lt=2**63)
    """Decides on initial weights, sample order and everything drawn."""
    steps: int | None = Field(default=None, ge=1)
    """Train until this many optimizer steps are done (or give epochs)."""
    epochs: float | None = Field(default=None, gt=0, le=1e9)
    """Train for this many passes over the data; whole global batches only."""
    on_nonfinite: Literal["stop", "continue"] = "stop"
    """What a loss or gradient that is NaN or infinite does to the job (fp16's overflow is not meant)."""

    @property
    def mode(self) -> int:
        """`permissions` as the operating system has them."""
        return 0o777 if self.permissions == "umask" else int(self.permissions, 8)

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> JobTable:
        if (self.steps is None) == (self.epochs is None):
            found = "neither" if self.steps is None else "both"
            raise ValueError(f"expected either steps or epochs, found {found}")
        return self


class ModelTable(SlotTable):
    """[model]"""

    name: str
    """A model plugin, or "package.module:callable" that returns a torch.nn.Module."""
    weights: Path | None = None
    """Start from these weights: a safetensors file (or the .safetensors.index.json of several), a directory that transformers'
    save_pretrained() made, a torch file, or a checkpoint's directory."""
    freeze: list[str] = []
    """Parameters that are not trained, as patterns such as "embedding.*"."""
    trainable: list[str] | None = Field(default=None, min_length=1)
    """The only parameters that are trained, as such patterns; those of freeze are not, either way."""
    loss: str | None = None
    """For a module of your own: "package.module:callable", called as loss(outputs, target) (a mean or per-sample)."""


class DatasetTable(SlotTable):
    """[dataset]"""

    name: str
    """A dataset plugin, or "package.module:callable" called as callable(split=..., **options)."""
    seq_length: int | None = Field(default=None, ge=1)
    """Tokens per sample (default: the model's max_seq_length)."""
    workers: int = Field(default=0, ge=0, le=1024)
    """Processes that load samples; 0 loads on a thread of the rank."""
    prefetch: int = Field(default=2, ge=1)
    """Micro batches that are loaded ahead of the step."""


class ParameterGroup(SlotTable):
    """[[optimizer.groups]]: other options for some parameters."""

    pattern: str | Annotated[list[str], Field(min_length=1)]
    """The parameters of the group, such as "*.bias"; the first group that matches takes a parameter."""


class OptimizerTable(SlotTable):
    """[optimizer]"""

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
            raise ValueError(
                'expected lr_reference_batch together with lr_scaling = "linear" or "sqrt", found one alone'
            )
        return self


class ScheduleTable(SlotTable):
    """[schedule]"""

    name: str = "constant"
    """A schedule plugin."""


class BatchTable(Table):
    """[batch]"""

    global_size: int | None = Field(default=None, ge=1)
    """Samples per optimizer step, over all ranks."""
    micro_size: int | None = Field(default=None, ge=1)
    """Samples per forward on one rank."""
    tokens: int | None = Field(default=None, ge=1)
    """In place of global_size: tokens per optimizer step at most, over all ranks, without padding."""
    micro_tokens: int | None = Field(default=None, ge=1)
    """In place of micro_size: tokens per forward on one rank at most, padding included."""

    @model_validator(mode="after")
    def _samples_or_tokens(self) -> BatchTable:
        found = [key for key in BatchTable.model_fields if getattr(self, key) is not None]
        if found not in (["global_size", "micro_size"], ["tokens", "micro_tokens"]):
            raise ValueError(
                f"expected either global_size and micro_size or tokens and micro_tokens, found {', '.join(found) or 'none'}"
            )
        if self.tokens is not None and self.micro_tokens is not None and self.micro_tokens > self.tokens:
            raise ValueError(
                f"expected either more tokens than micro_tokens or as many, found {self.tokens} and {self.micro_tokens}"
            )
        return self

    @property
    def size(self) -> int:
        """Samples or tokens per optimizer step."""
        return self.global_size or self.tokens or 0


class EvaluationTable(Table):
    """[evaluation]"""

    every_steps: int = Field(default=0, ge=0)
    """Evaluate after every so many steps and at the end; 0 is never."""
    batches: int | None = Field(default=None, ge=1)
    """Global batches of the validation split to evaluate on (default: all of it)."""


def _table_of_size(value: object) -> object:
    return {"size": value} if isinstance(value, int) and not isinstance(value, bool) else value


class AxisTable(SlotTable):
    """[parallelism.NAME]"""

    size: int = Field(ge=1)
    """Ranks along this axis."""


class ShardingTable(SlotTable):
    """[sharding]"""

    name: str | None = None
    """A sharding plugin."""
    stage: int | None = Field(default=None, ge=0)
    """Short for name = "zero-N": what the data-parallel ranks share: 0 nothing, 1 optimizer state, 2 gradients too, 3
    parameters too (ZeRO). 0 where neither is given."""

    @model_validator(mode="before")
    @classmethod
    def _one_of_both(cls, table: Any) -> Any:
        if isinstance(table, dict) and "name" in table and "stage" in table:
            raise ValueError("name and stage both choose the strategy; keep one of them")
        return {**table, "stage": 0} if isinstance(table, dict) and not {"name", "stage"} & table.keys() else table

    @property
    def choice(self) -> tuple[str, str]:
        """The key that chose the strategy, and what it says, as a person would write them."""
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
    """How gradients travel between data-parallel ranks: a compression plugin."""


class CheckpointTable(SlotTable):
    """[checkpoint]"""

    format: str = "hdf5"
    """A checkpoint format plugin."""
    every_steps: int = Field(default=0, ge=0)
    """Save after every so many steps; 0 does not. The last step is always saved."""
    every_epochs: float = Field(default=0, ge=0, le=1e9)
    """Save after every so many passes over the data, at the first step that completes one; 0 does not."""
    keep: int | None = Field(default=None, ge=1)
    """How many of the newest checkpoints stay on disk (default: all, or 1 with keep_every or keep_best)."""
    keep_every: int | None = Field(default=None, ge=1)
    """Checkpoints whose step is a multiple of this stay, too."""
    keep_best: int | None = Field(default=None, ge=1)
    """So many checkpoints with the lowest evaluation loss stay, too; needs [evaluation], and counts evaluated steps."""
    asynchronous: bool = False
    """Write in the background while training goes on; the next save waits for the one before."""
    on_error: Literal["stop", "continue"] = "stop"
    """What a checkpoint that cannot be written does to the job: stop it (exit 4), or say so and try at the next one."""


class CommunicatorTable(SlotTable):
    """[communicator]"""

    name: str = "auto"
    """A communicator plugin; auto takes the best one that is available."""
    timeout_seconds: float = Field(default=600, gt=0, le=1e8)
    """Longest wait of any communication before the job ends with the names of the missing ranks."""


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
    """A whole job. `hpctrain.load_job` reads one from a file; `Job.model_validate` makes one from a dict."""

    job: JobTable
    model: ModelTable
    dataset: DatasetTable
    optimizer: OptimizerTable
    schedule: ScheduleTable = ScheduleTable()
    batch: BatchTable
    evaluation: EvaluationTable = EvaluationTable()
    parallelism: dict[
        str, Annotated[AxisTable, BeforeValidator(_table_of_size, json_schema_input_type=int | AxisTable)]
    ] = {}
    """Mesh axes: an integer is short for a table with `size`. What is left of the ranks is data parallel."""
    sharding: ShardingTable = ShardingTable()
    precision: PrecisionTable = PrecisionTable()
    activation_checkpointing: ActivationCheckpointingTable = ActivationCheckpointingTable()
    compile: CompileTable = CompileTable()
    compression: CompressionTable = CompressionTable()
    checkpoint: CheckpointTable = CheckpointTable()
    communicator: CommunicatorTable = CommunicatorTable()
    logger: list[LoggerTable] = []
    hook: list[HookTable] = []
    plugins: PluginsTable = PluginsTable()

    @property
    def output_dir(self) -> Path:
        """Where the files of the run go."""
        return self.job.output_dir or Path("runs") / self.job.name
