"""The one module that plugin authors import; first-party plugins import nothing else of hpctrain."""

from pydantic import Field

from hpctrain.checkpoint.directory import sync_directory
from hpctrain.contracts.checkpoint import CheckpointFormat, StoredChunk, StoredTensor
from hpctrain.contracts.communicator import Communicator
from hpctrain.contracts.compression import (
    Compression,
    CompressionOptions,
    Compressor,
    GradientBucket,
    LossyCompression,
    Span,
)
from hpctrain.contracts.dataset import Dataset, DatasetContext, Lengths, Samples, Split
from hpctrain.contracts.distribution import ActivationCheckpointing, Parallelism, Sharding
from hpctrain.contracts.logger import Logger
from hpctrain.contracts.model import Batch, ModelSpec
from hpctrain.contracts.optimization import Optimizer, OptimizerOptions, Schedule
from hpctrain.contracts.pieces import Piece, State, pieces_of, set_row_order
from hpctrain.contracts.plugin import ByteSize, Options, Plugin
from hpctrain.contracts.precision import Precision
from hpctrain.contracts.runner import MicroBatch, Runner, RunnerParts
from hpctrain.errors import CheckpointError, EnvironmentUnfitError, HpctrainError, TrainingError, UsageError
from hpctrain.gradients.residual import Residual
from hpctrain.gradients.sums import BucketSum, GradientSums
from hpctrain.hookspecs import hookimpl
from hpctrain.model.seeded import fill_normal
from hpctrain.model.tied import tie, tied_parameters
from hpctrain.mpi import shared_zeros
from hpctrain.plugins.discovery import API_VERSION
from hpctrain.world.identity import Identity
from hpctrain.world.meeting import mpi_backend

__all__ = [
    "API_VERSION",
    "ActivationCheckpointing",
    "Batch",
    "BucketSum",
    "ByteSize",
    "CheckpointError",
    "CheckpointFormat",
    "Communicator",
    "Compression",
    "CompressionOptions",
    "Compressor",
    "Dataset",
    "DatasetContext",
    "EnvironmentUnfitError",
    "Field",
    "GradientBucket",
    "GradientSums",
    "HpctrainError",
    "Identity",
    "Lengths",
    "Logger",
    "LossyCompression",
    "MicroBatch",
    "ModelSpec",
    "Optimizer",
    "OptimizerOptions",
    "Options",
    "Parallelism",
    "Piece",
    "Plugin",
    "Precision",
    "Residual",
    "Runner",
    "RunnerParts",
    "Samples",
    "Schedule",
    "Sharding",
    "Span",
    "Split",
    "State",
    "StoredChunk",
    "StoredTensor",
    "TrainingError",
    "UsageError",
    "fill_normal",
    "hookimpl",
    "mpi_backend",
    "pieces_of",
    "set_row_order",
    "shared_zeros",
    "sync_directory",
    "tie",
    "tied_parameters",
]
