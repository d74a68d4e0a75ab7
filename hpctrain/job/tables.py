"""The tables of a job file and the keys of the core; all other keys in a slot's table are the plugin's options."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from hpctrain.job.rank_tables import (
    ActivationCheckpointingTable,
    AxisTable,
    CommunicatorTable,
    CompileTable,
    CompressionTable,
    ElasticTable,
    GuardTable,
    PrecisionTable,
    ProfileTable,
    SchedulerTable,
    ShardingTable,
    WatchdogTable,
)
from hpctrain.job.table_types import (
    Seconds,
    SlotTable,
    Table,
    Variable,
    VariableValue,
    error_of_several_keys,
    of_file_system,
    table_of,
)
from hpctrain.job.training_tables import (
    BatchTable,
    DatasetTable,
    EvaluationTable,
    MetricTable,
    ModelTable,
    OptimizerTable,
    ScheduleTable,
)


def _file_name(name: str) -> str:
    if not name or "/" in name or name in (".", ".."):
        raise ValueError("expected a name that can be a directory's, without '/'")
    return of_file_system(name)


def _not_empty(path: object) -> object:
    if path == "":
        raise ValueError('expected a directory, "." for the current one')
    return of_file_system(path) if isinstance(path, str) else path


def _permissions(text: str) -> str:
    if text != "umask" and not re.fullmatch("0?7[0-7]{2}", text):
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
    """Take deterministic algorithms only, for the same bits on the same hardware; an operation that has none ends the job. On CPUs
    a job gives the same bits without it."""
    start: Literal["fork", "spawn"] = "fork"
    """How `-n` starts ranks: as forks of its own process, which has imported torch, or each anew."""
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


class KeepBestTable(Table):
    """[checkpoint] keep_best = { ... }"""

    count: int = Field(default=1, ge=1)
    """How many."""
    metric: str = "loss"
    """Measure that they go by: the loss, or the name of a metric that [[metric]] measures, as it stands behind "evaluation_"."""
    mode: Literal["min", "max"] = "min"
    """Whether the lowest or the highest is the best."""


KeepBest = Annotated[
    KeepBestTable, BeforeValidator(partial(table_of, "count"), json_schema_input_type=int | KeepBestTable)
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
    elastic: ElasticTable | None = None
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
