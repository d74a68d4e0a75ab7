"""The version of the plugin interface, and how its contracts changed from version to version (docs/plugin-api.md)."""

from __future__ import annotations

import re
from dataclasses import dataclass

API_VERSION = 2
"""Raised with every change of the public interface; `tests/plugin_api.py` compares it with its record."""

FIRST_RELEASED = 2
"""The version of a module that states none as `HPCTRAIN_API`."""
_PROBLEMS = "`problems(plan)` returns a list of `Problem`"
_MISSING = "`missing(machine)` says what the machine lacks"


@dataclass(frozen=True)
class Change:
    """A member of a contract that was removed or means something else since `version`.

    parameters: those of a removed method, without self; None for anything else. instead: what to write.
    """

    version: int
    contract: str
    member: str
    parameters: tuple[str, ...] | None
    instead: str


def _all(version: int, contract: str, members: str, instead: str) -> list[Change]:
    """members: names, those of removed methods with their parameters."""
    found = re.finditer(r"(\w+)(?:\(([^)]*)\))?", members)
    return [
        Change(version, contract, one[1], None if one[2] is None else tuple(re.findall(r"\w+", one[2])), instead)
        for one in found
    ]


CHANGES: tuple[Change, ...] = (
    *_all(2, "ActivationCheckpointing", "refuse(spec, splits_backward)", _PROBLEMS),
    *_all(2, "Compression", "refuse(sharding, axes)", _PROBLEMS),
    *_all(2, "Sharding", "refuse(spec, axes)", _PROBLEMS),
    *_all(2, "Parallelism", "refuse(spec, size) refuse_micro_batches(count, size) refuse_compile(whole)", _PROBLEMS),
    *_all(2, "Communicator", "unavailable(identity)", _MISSING),
    *_all(
        2,
        "Communicator",
        "choose(identity, installed)",
        "`candidates(installed)` returns communicators, the best first",
    ),
    *_all(2, "Precision", "unfit(device)", _MISSING),
    *_all(2, "Precision", "convert", "it takes `spec` as its second argument"),
    *_all(
        2,
        "ModelSpec",
        "meta initialize(name, tensor, rows, seed)",
        "a model that is built on the meta device derives from `MetaModel`",
    ),
    *_all(2, "ModelSpec", "outline() build_on_meta()", "`MetaModel.build` runs on the meta device; remove the method"),
    *_all(2, "ModelSpec", "vocab_size max_seq_length", "a model that reads ids derives from `TokenModel`"),
    *_all(2, "ModelSpec", "padding()", "a model that takes padded batches derives from `PaddedModel`"),
    *_all(2, "ModelSpec", "attention_heads", "a model whose heads are shared out derives from `AttentionModel`"),
    *_all(2, "ModelSpec", "tensor_plan()", "a model with a plan derives from `TensorParallelModel`"),
    *_all(
        2, "ModelSpec", "sequence_dims() attentions(module)", "a model with both derives from `ContextParallelModel`"
    ),
    *_all(
        2,
        "ModelSpec",
        "ends(module) embed(module, batch) head(module, hidden)",
        "a model with all three derives from `PipelineModel`",
    ),
    *_all(
        2,
        "Parallelism",
        "axis order repeats_loss cuts_samples splits_module repeats_activations shares_heads splits_backward one_shape "
        "one_compiled_shape",
        "the property `traits` returns them as an `AxisTraits`",
    ),
    *_all(
        2,
        "Parallelism",
        "context() split_batch(batch) runner(parts)",
        "the `AppliedAxis` that `apply` returns has it",
    ),
    *_all(2, "Parallelism", "apply", "it returns an `AppliedAxis`"),
    *_all(2, "Parallelism", "sequence_multiple(size)", "it takes the model as its second argument"),
    *_all(2, "ActivationCheckpointing", "apply", "it takes `replicas` as its third argument"),
    *_all(
        2,
        "Sharding",
        "apply(module, spec, mesh, sums) materialized(module) begin(last, interleaved) synchronize() refresh() pieces() "
        "optimizer(groups, build)",
        "`shard(module, spec, mesh, sums)` returns a `ShardedModel`, which has the rest",
    ),
    *_all(
        2,
        "Precision",
        "scale(loss) unscale(gradients) skips_nonfinite update(finite) state() restore(state)",
        "`start()` returns a `LossScaler`, which has the scale and its state",
    ),
    *_all(
        2,
        "Compression",
        "all_reduce(bucket, group) reduce_scatter(output, bucket, group)",
        "`LossyCompression.compressor` returns a `Compressor`, which sums",
    ),
    *_all(2, "Compressor", "settle()", "it is `consolidate()` now"),
    *_all(
        2,
        "CheckpointFormat",
        "snapshot(state) write(snapshot, directory, group)",
        "`writer()` returns a `CheckpointWriter`, which has it",
    ),
    *_all(2, "Scheduler", "cancel", "it takes the run's `directory` as its second argument"),
    *_all(2, "Logger", "open", "it returns a `LogWriter`"),
    *_all(2, "Logger", "log(row) close()", "the `LogWriter` that `open` returns has it"),
    *_all(2, "Runner", "busy()", "`figures()` and `metrics(figures)` report a step's measurements"),
    *_all(2, "Runner", "evaluate", "it takes `see` as its second argument, and calls it with outputs and batch"),
)


def changes_of(contracts: set[str], member: str) -> list[Change]:
    """How `member` of the contracts with these names changed, oldest first."""
    return [one for one in CHANGES if one.contract in contracts and one.member == member]
