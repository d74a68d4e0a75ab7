"""The module that plugin authors import; first-party plugins import nothing of hpctrain but this and hpctrain.toolkit."""

from pydantic import Field

from hpctrain.base.accounting import record_wait
from hpctrain.base.devices import (
    accelerator,
    accelerator_count,
    allow_tf32,
    device_name,
    device_of_rank,
    forked_random_state,
    has_float64,
    is_accelerator,
    mark,
    nvidia_capability,
    profiler_ranges,
    seconds_between,
    takes_bf16,
)
from hpctrain.base.errors import (
    EXIT_ENVIRONMENT,
    CheckpointError,
    EnvironmentUnfitError,
    HpctrainError,
    TrainingError,
    UsageError,
    escaped,
    reason,
    shown,
)
from hpctrain.base.json_values import decode as decode_value
from hpctrain.base.json_values import encode as encode_value
from hpctrain.base.random_numbers import fill_normal
from hpctrain.base.safe_files import (
    TABLE_BYTES,
    created,
    make_directory,
    open_regular,
    read_all,
    reading,
    replacing,
    sync_directory,
    temporary_name,
)
from hpctrain.base.side_stream import Done, SideStream, copy_to_host
from hpctrain.base.store.gloo import gloo_backend
from hpctrain.base.torch_attention import AttentionKernel, Documents, causal_attention, fused_attention
from hpctrain.base.torch_groups import PythonGroup
from hpctrain.base.torch_private import (
    MemoryHistory,
    TorchDispatchMode,
    buffers_of,
    children_of,
    communicate_by_dtype,
    foreach_copy_,
    is_mutable,
    is_profiling,
    is_view,
    joint_mesh,
    move_local,
    profiler_settings,
    storage_record,
    uncompiled,
    version_of,
)
from hpctrain.contracts.activation_checkpointing import ActivationCheckpointing
from hpctrain.contracts.checkpoint import CheckpointFormat, CheckpointWriter, StoredChunk, StoredTensor
from hpctrain.contracts.communicator import Communicator
from hpctrain.contracts.compression import (
    BucketSum,
    Compression,
    CompressionOptions,
    Compressor,
    GradientBucket,
    GradientSums,
    LossyCompression,
    Span,
)
from hpctrain.contracts.dataset import (
    Collate,
    Dataset,
    DatasetContext,
    Lengths,
    Mixture,
    Part,
    Samples,
    Split,
    Stream,
    TextDataset,
    Weights,
)
from hpctrain.contracts.identity import Identity
from hpctrain.contracts.life_cycle import Control, Hook, LiveModel, Membership, PluginState, Profiler, Request
from hpctrain.contracts.logger import Logger, LogWriter
from hpctrain.contracts.metric import Metric, RunningMetric, SummedMetric
from hpctrain.contracts.model import (
    AttentionModel,
    Batch,
    ContextParallelModel,
    DistributedAttentionModel,
    ExportableModel,
    MetaModel,
    ModelSpec,
    PackedModel,
    PaddedModel,
    PipelineModel,
    TensorParallelModel,
    TokenModel,
)
from hpctrain.contracts.optimization import MatrixOptimizer, Optimizer, OptimizerOptions, Schedule, WholeTensors
from hpctrain.contracts.parallelism import AppliedAxis, AxisTraits, Parallelism, PipelineSchedule
from hpctrain.contracts.pieces import Piece, State, pieces_of, set_row_order
from hpctrain.contracts.plan import Plan
from hpctrain.contracts.plugin import ByteSize, Machine, Options, Plugin, Problem
from hpctrain.contracts.precision import LossScaler, Precision
from hpctrain.contracts.runner import MicroBatch, Runner, RunnerParts, See
from hpctrain.contracts.scheduler import JobState, Launch, Scheduler, SubmittedRun
from hpctrain.contracts.sharding import ShardedModel, Sharding
from hpctrain.job.tables import Job
from hpctrain.model.gradients import Residual
from hpctrain.model.parameters import named_tensors, tie, tied_parameters
from hpctrain.model.trials import without_trace
from hpctrain.mpi import Settings as MPISettings
from hpctrain.mpi import mpi_backend, shared_zeros
from hpctrain.ranks.json_collectives import (
    Outcome,
    agree,
    attempt,
    broadcast_value,
    gather_outcomes,
    gather_values,
    scatter_outcomes,
)
from hpctrain.registry.hookspecs import hookimpl

__all__ = [
    "EXIT_ENVIRONMENT", "TABLE_BYTES", "ActivationCheckpointing", "AppliedAxis", "AttentionKernel", "AttentionModel",
    "AxisTraits", "Batch", "BucketSum", "ByteSize", "CheckpointError", "CheckpointFormat", "CheckpointWriter",
    "Collate", "Communicator", "Compression", "CompressionOptions", "Compressor", "ContextParallelModel", "Control",
    "Dataset", "DatasetContext", "DistributedAttentionModel", "Documents", "Done", "EnvironmentUnfitError",
    "ExportableModel", "Field", "GradientBucket", "GradientSums", "Hook", "HpctrainError", "Identity", "Job",
    "JobState", "Launch", "Lengths", "LiveModel", "LogWriter", "Logger", "LossScaler", "LossyCompression",
    "MPISettings", "Machine", "MatrixOptimizer", "Membership", "MemoryHistory", "MetaModel", "Metric", "MicroBatch",
    "Mixture", "ModelSpec", "Optimizer", "OptimizerOptions", "Options", "Outcome", "PackedModel", "PaddedModel",
    "Parallelism", "Part", "Piece", "PipelineModel", "PipelineSchedule", "Plan", "Plugin", "PluginState", "Precision",
    "Problem", "Profiler", "PythonGroup", "Request", "Residual", "Runner", "RunnerParts", "RunningMetric", "Samples",
    "Schedule", "Scheduler", "See", "ShardedModel", "Sharding", "SideStream", "Span", "Split", "State", "StoredChunk",
    "StoredTensor", "Stream", "SubmittedRun", "SummedMetric", "TensorParallelModel", "TextDataset", "TokenModel",
    "TorchDispatchMode", "TrainingError", "UsageError", "Weights", "WholeTensors", "accelerator", "accelerator_count",
    "agree", "allow_tf32", "attempt", "broadcast_value", "buffers_of", "causal_attention", "children_of",
    "communicate_by_dtype", "copy_to_host", "created", "decode_value", "device_name", "device_of_rank", "encode_value",
    "escaped", "fill_normal", "foreach_copy_", "forked_random_state", "fused_attention", "gather_outcomes",
    "gather_values", "gloo_backend", "has_float64", "hookimpl", "is_accelerator", "is_mutable", "is_profiling",
    "is_view", "joint_mesh", "make_directory", "mark", "move_local", "mpi_backend", "named_tensors",
    "nvidia_capability", "open_regular", "pieces_of", "profiler_ranges", "profiler_settings", "read_all", "reading",
    "reason", "record_wait", "replacing", "scatter_outcomes", "seconds_between", "set_row_order", "shared_zeros",
    "shown", "storage_record", "sync_directory", "takes_bf16", "temporary_name", "tie", "tied_parameters", "uncompiled",
    "version_of", "without_trace",
]  # fmt: skip
