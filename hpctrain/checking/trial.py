"""Trials of `hpctrain check` beyond the job's check: its model, optimizer, weights and data, before ranks start."""

from __future__ import annotations

import os
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from hpctrain.base.devices import device_of_rank
from hpctrain.base.errors import EXIT_CHECKPOINT, EXIT_TRAINING, HpctrainError, reason
from hpctrain.checking.choices import choices, lacking
from hpctrain.checkpoint.state import model_pieces
from hpctrain.checkpoint.weights import load_weights, open_weights
from hpctrain.checkpoint.writing import alone
from hpctrain.contracts.identity import Identity
from hpctrain.contracts.model import MetaModel, ModelSpec
from hpctrain.contracts.optimization import Optimizer
from hpctrain.contracts.plugin import Machine
from hpctrain.contracts.precision import Precision
from hpctrain.data.opening import Data, open_data
from hpctrain.job.parts import Parts
from hpctrain.job.problems import PlacedProblem
from hpctrain.job.tables import Job
from hpctrain.model.build import build_on_meta, given_names
from hpctrain.model.conformance.trials import refuse_idle_optimizer
from hpctrain.model.parameters import build_optimizer, tied_parameters
from hpctrain.plugins.blame import raised_in
from hpctrain.plugins.registry import Registry

_FULL = 0.9
"""The share of lr that a schedule is expected to reach."""


def build_outline(spec: ModelSpec, problems: list[PlacedProblem], tries: bool, registry: Registry) -> nn.Module | None:
    """The model's modules, on the meta device where they can be built there.

    tries: build the user's own model, too; else the result is None for it.
    """
    try:
        if isinstance(spec, MetaModel):
            return build_on_meta(spec)
        if tries:
            return _built(spec)
    except HpctrainError as error:
        problems.append(PlacedProblem(("model", "name"), str(error), error.exit_code))
    except Exception as error:  # a third party's code: the report names it
        why = f"[model] name = {spec.name!r}: {raised_in(error, registry)}"
        problems.append(PlacedProblem(("model", "name"), why, EXIT_TRAINING))
    return None


def try_optimizer(optimizer: Optimizer, problems: list[PlacedProblem], registry: Registry) -> None:
    """Build an optimizer for one parameter, and let it step."""
    try:
        build_optimizer(optimizer, [{"params": [nn.Parameter(torch.zeros(2, 2))]}])
        refuse_idle_optimizer(optimizer, partial(build_optimizer, optimizer))
    except HpctrainError as error:
        if isinstance(error.__cause__, (TypeError, ValueError, type(None))):  # other errors: it may need a GPU
            problems.append(PlacedProblem(("optimizer", "name"), str(error), error.exit_code))
    except Exception as error:  # a third party's code: the report names it
        why = f"[optimizer] name = {optimizer.name!r}: {raised_in(error, registry)}"
        problems.append(PlacedProblem(("optimizer", "name"), why, EXIT_TRAINING))


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


def _built(spec: ModelSpec) -> nn.Module:
    """The module on the meta device; with values, as a rank builds it, if the model's code can't build it there."""
    with torch.random.fork_rng(devices=[]):
        try:
            return build_on_meta(spec)
        except HpctrainError:
            return spec.build()


def open_outside(job: Job, parts: Parts, module: nn.Module | None) -> tuple[Data | None, list[PlacedProblem]]:
    """The data, and the problems of weights and data. module: the model, if it is known before it is built."""
    problems = _weights_problems(job, parts, module)
    try:
        return open_data(job, parts), problems
    except HpctrainError as error:
        return None, [*problems, PlacedProblem(("dataset", "name"), str(error), error.exit_code)]


def _weights_problems(job: Job, parts: Parts, module: nn.Module | None) -> list[PlacedProblem]:
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
