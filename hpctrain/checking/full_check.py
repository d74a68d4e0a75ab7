"""The whole check of `hpctrain check` and `submit`: the job, its data and weights, its directory, and its model's size."""

from __future__ import annotations

from math import prod

import torch
from torch import nn

from hpctrain.checking.check import CheckedJob, check
from hpctrain.checking.resolved import refuse_other_job, resolved_tables
from hpctrain.checking.trial import open_outside
from hpctrain.checkpoint.state import create_state
from hpctrain.contracts.optimization import Optimizer
from hpctrain.data.opening import Data
from hpctrain.job.problems import JobError
from hpctrain.job.raw import RawJob
from hpctrain.job.run_files import RESOLVED
from hpctrain.model.parameters import trained_names

_SIDE = 64
"""The side of the square parameter with which an optimizer's state is measured."""


def check_thoroughly(raw: RawJob, ranks: int | None) -> tuple[CheckedJob, Data]:
    """The job and its data. Raises JobError with every problem, UsageError if the output directory holds another job,
    EnvironmentUnfitError for a plugin that makes something unfit."""
    checked = check(raw, ranks, tries=True)
    data, problems = open_outside(checked.job, checked.parts, checked.plan.outline)
    if data is None or problems:
        raise JobError(checked.raw, problems)
    refuse_other_job(checked.job.output_dir / RESOLVED, resolved_tables(checked))
    return checked, data


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
