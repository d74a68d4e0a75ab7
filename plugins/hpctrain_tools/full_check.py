"""The whole check of `hpctrain check` and `submit`: the job, its data and weights, its directory; notes, and the model's size."""

from __future__ import annotations

import os
from math import prod

import torch
import torch.distributed as dist
from torch import nn

from hpctrain.base.devices import device_of_rank
from hpctrain.base.errors import EXIT_CHECKPOINT, HpctrainError, reason
from hpctrain.base.safe_files import RESOLVED
from hpctrain.checking.check import CheckedJob, check
from hpctrain.checking.choices import choices, lacking
from hpctrain.checking.resolved import refuse_other_job, resolved_tables
from hpctrain.checkpoint.state import create_state, model_pieces
from hpctrain.checkpoint.weights import load_weights, open_weights
from hpctrain.contracts.identity import Identity
from hpctrain.contracts.optimization import Optimizer
from hpctrain.contracts.plugin import Machine
from hpctrain.contracts.precision import Precision
from hpctrain.data.opening import Data, open_data
from hpctrain.job.parts import Parts
from hpctrain.job.problems import JobError, PlacedProblem
from hpctrain.job.raw import RawJob
from hpctrain.job.tables import Job
from hpctrain.model.build import given_names
from hpctrain.model.parameters import tied_parameters, trained_names
from hpctrain.registry.registry import Registry
from hpctrain_tools.checkpoint.writing import alone

# the share of lr that a schedule is expected to reach
_FULL = 0.9
# the side of the square parameter with which an optimizer's state is measured
_SIDE = 64


def check_thoroughly(raw: RawJob, ranks: int | None) -> tuple[CheckedJob, Data]:
    """The job and its data. Raises JobError with every problem, UsageError if the output directory holds another job,
    EnvironmentUnfitError for a plugin that makes something unfit."""
    checked = check(raw, ranks, tries=True)
    problems = _weights_problems(checked.job, checked.parts, checked.plan.outline)
    try:
        data = open_data(checked.job, checked.parts)
    except HpctrainError as error:
        problems.append(PlacedProblem(("dataset", "name"), str(error), error.exit_code))
    if problems:
        raise JobError(raw, problems)
    refuse_other_job(checked.job.output_dir / RESOLVED, resolved_tables(checked))
    return checked, data


def _weights_problems(job: Job, parts: Parts, module: nn.Module | None) -> list[PlacedProblem]:
    """Problems of [model] weights. module: the model, if it is known before it is built."""
    weights, key = job.model.weights, ("model", "weights")
    if weights is None:
        return []
    if not os.access(weights, os.R_OK):
        why = f"[model] weights: there are none at {weights}, or no permission to read them"
        return [PlacedProblem(key, f"{why}; expected a path (names of the Hugging Face hub are not taken)")]
    try:  # reads only their table
        if module is None or dist.is_initialized() or type(parts.precision).convert is not Precision.convert:
            open_weights(weights, parts.formats)
            return []
        pieces = model_pieces(module, [], (), given_names(parts.model, module))
        with alone() as group:
            tied, strict = tied_parameters(module), job.model.weights_strict
            load_weights(weights, parts.formats, pieces, group, tied, strict=strict, reads=False)
    except RuntimeError:  # of a group of one, without any network
        return []
    except (HpctrainError, OSError) as error:
        code = error.exit_code if isinstance(error, HpctrainError) else EXIT_CHECKPOINT
        return [PlacedProblem(key, f"[model] weights: {reason(error)}", code)]
    return []


def notes(job: Job, parts: Parts, registry: Registry, ranks: int | None) -> list[str]:
    """Sentences about matters that are not mistakes of the job: missing requirements of this machine, a rate that stays low."""
    machine = Machine(Identity(source="mpi" if ranks is not None and ranks > 1 else "alone"), device_of_rank(0))
    said = [
        f"hpctrain run would refuse this machine: {sentence}"
        for sentence in lacking(choices(job, parts), machine, registry)
    ]
    steps = job.scheduled_epochs or job.job.steps
    peak = (
        1.0
        if steps is None
        else max(parts.schedule.factor(step, steps) for step in range(0, steps, max(1, steps // 1000)))
    )
    if peak < _FULL:
        said.append(
            f"[schedule] name = {parts.schedule.name!r}: the learning rate rises to {peak:.0%} of [optimizer] lr within "
            f"{steps} {job.schedule.unit}s"
        )
    return said


def sizes(checked: CheckedJob) -> tuple[str, int | None]:
    """The parameters in words ("6,115 parameters"), and the bytes that a rank needs for them, their gradients and the optimizer's
    state, without activations, buffers and what libraries keep.

    The bytes are None where the number of ranks is not known, or what the strategy of sharding or the optimizer keeps.
    """
    job, parts, plan = checked.job, checked.parts, checked.plan
    assert plan.outline is not None, "a thorough check has built the model"
    dtype, names = parts.precision.parameter_dtype, trained_names(plan.outline, job.model.freeze, job.model.trainable)
    elements = {name: parameter.numel() for name, parameter in plan.outline.named_parameters()}
    everything, trained = sum(elements.values()), sum(elements[name] for name in names)
    told = f"{everything:,} parameters" + (f", {trained:,} of them trained" if trained < everything else "")
    state, spread = bytes_of_state(parts.optimizer, dtype), parts.sharding.divides
    if plan.data_ranks is None or state is None or spread is None:
        return told, None
    replicate = job.parallelism["replicate"].size if "replicate" in job.parallelism else 1
    shards = plan.data_ranks // replicate
    ranks = prod(plan.sizes[name] for name, axis in plan.parallelism.items() if not axis.traits.cuts_samples)
    needed = {
        "parameters": everything * dtype.itemsize,
        "gradients": trained * dtype.itemsize,
        "optimizer state": trained * state,
    }
    total = sum(nbytes / ranks / (shards if what in spread else 1) for what, nbytes in needed.items())
    return told, round(total)


def bytes_of_state(optimizer: Optimizer, dtype: torch.dtype) -> float | None:
    """Bytes of an optimizer's state for each element of a large parameter; None if it can't be made here."""
    parameter = nn.Parameter(torch.zeros(_SIDE, _SIDE, dtype=dtype))
    try:
        made = optimizer.build([{"params": [parameter]}])
        create_state(made)
        tensors = [value for value in made.state[parameter].values() if isinstance(value, torch.Tensor)]
        return sum(tensor.nbytes for tensor in tensors if tensor.numel() > 1) / parameter.numel()
    except Exception:  # a third party's code; `try_optimizer` and the start of a run report what is wrong
        return None
