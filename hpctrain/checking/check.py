"""Checks a whole job against the core's tables and the installed plugins, and reports every problem at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from hpctrain.base.errors import EXIT_TRAINING, HpctrainError, UsageError
from hpctrain.base.torch_private import delay_compiler
from hpctrain.checking.choices import plugin_problems
from hpctrain.checking.combinations import combination_problems
from hpctrain.checking.making import PartsMaker
from hpctrain.contracts.identity import Identity
from hpctrain.contracts.model import MetaModel, ModelSpec
from hpctrain.contracts.optimization import Optimizer
from hpctrain.contracts.plan import Plan
from hpctrain.job.parts import Parts
from hpctrain.job.problems import JobError, PlacedProblem, keys_below, problems_of, validate
from hpctrain.job.raw import RawJob
from hpctrain.job.tables import Job
from hpctrain.model.build import build_on_meta
from hpctrain.model.mesh import Layout, layout_of, plan_of
from hpctrain.model.parameters import build_optimizer
from hpctrain.plugins.blame import raised_in, retell_plugin_error
from hpctrain.plugins.entry_points import entry_points
from hpctrain.plugins.registry import Registry, build_registry
from hpctrain.ranks.detection import torchrun_variables

__all__ = ["CheckedJob", "check"]


@dataclass(frozen=True)
class CheckedJob:
    """A job that can be trained, with its plugins."""

    job: Job
    parts: Parts
    registry: Registry
    raw: RawJob
    plan: Plan


def check(raw: RawJob, world_size: int | None, tries: bool = False) -> CheckedJob:
    """Raises JobError with every problem of the job. With `world_size`, the layout and the batch are checked, too.

    tries: also build the user's own model and an optimizer. Ranks skip this trial: they build both anyway.
    """
    delay_compiler()
    # what a rank imports may ask which rank it is
    with (
        nullcontext()
        if {"RANK", "WORLD_SIZE"} <= os.environ.keys()
        else torchrun_variables(Identity(size=world_size or 1))
    ):
        return _check(raw, world_size, tries)


def _check(raw: RawJob, world_size: int | None, tries: bool) -> CheckedJob:
    """Each stage needs what the one before has made, so all problems of a stage are reported at once."""
    loading = raw.tables.get("plugins")
    lists = {key: _texts(loading.get(key)) for key in ("load", "block")} if isinstance(loading, dict) else {}
    registry = build_registry(lists.get("load", ()), lists.get("block", ()), complete=False)
    problems = _unknown_names(lists.get("block", ()), registry)
    job = _core_tables(raw, problems)
    made = PartsMaker(raw, registry, problems).make_all()
    if problems or job is None:
        raise JobError(raw, problems)
    parts = Parts(**made, **_installed(registry))
    outline = _outline_of(parts.model, problems, tries, registry)
    try:
        plan = plan_of(job, parts, outline, _layout(job, parts, world_size, problems))
        problems += combination_problems(job, parts, plan)
    except HpctrainError:
        raise
    except Exception as error:  # from a plugin's traits, or from its way of cutting the ranks
        retell_plugin_error(error, registry)
        raise
    problems += plugin_problems(job, parts, plan, registry)
    if tries and not any(problem.key[0] == "optimizer" for problem in problems):
        _try_optimizer(parts.optimizer, problems, registry)
    if problems:
        raise JobError(raw, problems)
    return CheckedJob(job, parts, registry, raw, plan)


def _outline_of(spec: ModelSpec, problems: list[PlacedProblem], tries: bool, registry: Registry) -> nn.Module | None:
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


def _built(spec: ModelSpec) -> nn.Module:
    """The module on the meta device; with values, as a rank builds it, if the model's code can't build it there."""
    with torch.random.fork_rng(devices=[]):
        try:
            return build_on_meta(spec)
        except HpctrainError:
            return spec.build()


def _try_optimizer(optimizer: Optimizer, problems: list[PlacedProblem], registry: Registry) -> None:
    """Build an optimizer for one parameter, and let it step."""
    try:
        build_optimizer(optimizer, [{"params": [nn.Parameter(torch.zeros(2, 2))]}])
    except HpctrainError as error:
        if isinstance(error.__cause__, (TypeError, ValueError, type(None))):  # other errors: it may need a GPU
            problems.append(PlacedProblem(("optimizer", "name"), str(error), error.exit_code))
    except Exception as error:  # a third party's code: the report names it
        why = f"[optimizer] name = {optimizer.name!r}: {raised_in(error, registry)}"
        problems.append(PlacedProblem(("optimizer", "name"), why, EXIT_TRAINING))


def _layout(job: Job, parts: Parts, world_size: int | None, problems: list[PlacedProblem]) -> Layout | None:
    try:
        return None if world_size is None else layout_of(job, parts, world_size)
    except UsageError as error:
        problems.append(PlacedProblem(("parallelism",), str(error)))
        return None


def _unknown_names(names: Sequence[str], registry: Registry) -> list[PlacedProblem]:
    """Problems for unknown names in [plugins] block."""
    known = {name for one in (*entry_points(), *registry.sources) for name in one.names} if names else set()
    expected = "expected an entry point, a module or a distribution, as listed by `hpctrain plugins`"
    return [
        PlacedProblem.at(("plugins", "block", i), f"no installed or loaded plugin has the name {name!r}; {expected}")
        for i, name in enumerate(names)
        if name not in known
    ]


def _texts(value: object) -> tuple[str, ...]:
    return tuple(v for v in value if isinstance(v, str)) if isinstance(value, list) else ()


def _core_tables(raw: RawJob, problems: list[PlacedProblem]) -> Job | None:
    try:
        job = validate(Job, raw.tables)
    except ValidationError as error:
        problems += problems_of(error, (), raw.tables, partial(keys_below, Job, ["extends"]))
        return None
    assert isinstance(job, Job)
    return job


def _installed(registry: Registry) -> dict[str, Any]:
    """Every format and communicator that can be made without options."""
    return {"formats": registry.made("checkpoint"), "communicators": registry.made("communicator")}
