"""Checks a whole job against the core's tables and the installed plugins, and reports every problem at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from pydantic import ValidationError
from torch import nn

from hpctrain.base.errors import EXIT_TRAINING, HpctrainError
from hpctrain.base.torch_private import delay_compiler
from hpctrain.checking.choices import plugin_problems
from hpctrain.checking.combinations import combination_problems
from hpctrain.checking.making import PartsMaker
from hpctrain.contracts.identity import Identity
from hpctrain.contracts.model import MetaModel, ModelSpec
from hpctrain.contracts.optimization import Optimizer
from hpctrain.contracts.plan import Plan
from hpctrain.job.parts import Parts
from hpctrain.job.problems import JobError, PlacedProblem, collecting, keys_below, problems_of, validate
from hpctrain.job.raw import RawJob
from hpctrain.job.tables import Job
from hpctrain.model.build import build_on_meta
from hpctrain.model.mesh import layout_of, plan_of
from hpctrain.model.parameters import build_optimizer
from hpctrain.model.trials import refuse_hidden_state
from hpctrain.ranks.detection import torchrun_variables
from hpctrain.registry.blame import raised_in, retell_plugin_error
from hpctrain.registry.entry_points import entry_points
from hpctrain.registry.registry import Registry, build_registry

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
    """Raise JobError with every problem of the job. With `world_size`, the layout and the batch are checked, too.

    tries: also build the user's own model and an optimizer. Ranks skip this trial: they build both anyway.
    """
    delay_compiler()
    is_rank = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    # what a rank imports may ask which rank it is
    with nullcontext() if is_rank else torchrun_variables(Identity(size=world_size or 1)):
        return _check(raw, world_size, tries)


def _check(raw: RawJob, world_size: int | None, tries: bool) -> CheckedJob:
    """Check in stages: each needs what the one before has made, so only the problems of one stage can be reported together."""
    lists = raw.tables.get("plugins")
    values = [lists.get(key) if isinstance(lists, dict) else None for key in ("load", "block")]  # not checked yet
    load, block = (
        [text for text in value if isinstance(text, str)] if isinstance(value, list) else [] for value in values
    )
    registry = build_registry(load, block, complete=False)
    problems = _unknown_names(block, registry)
    job = None
    try:
        job = validate(Job, raw.tables)
    except ValidationError as error:
        problems += problems_of(error, (), raw.tables, partial(keys_below, Job, ["extends"]))
    plugins = PartsMaker(raw, registry, problems).make_all()  # also of a job with wrong tables: it hears of all
    if problems or not isinstance(job, Job):
        raise JobError(raw, problems)
    formats, communicators = registry.instances("checkpoint"), registry.instances("communicator")
    parts = Parts(**plugins, formats=formats, communicators=communicators)
    outline = _outline_of(parts.model, problems, tries, registry)
    layout = None
    try:
        with collecting(("parallelism",), problems):
            layout = None if world_size is None else layout_of(job, parts, world_size)
        plan = plan_of(job, parts, outline, layout)
        problems += combination_problems(job, parts, plan)
    except HpctrainError:
        raise
    except Exception as error:  # from a plugin's traits, or from its way of cutting the ranks
        retell_plugin_error(error, registry)
        raise
    problems += plugin_problems(job, parts, plan, registry)
    if tries and not any(problem.key[0] == "optimizer" for problem in problems):  # else the trial repeats them
        _try_optimizer(parts.optimizer, problems, registry)
    if problems:
        raise JobError(raw, problems)
    return CheckedJob(job, parts, registry, raw, plan)


def _outline_of(spec: ModelSpec, problems: list[PlacedProblem], tries: bool, registry: Registry) -> nn.Module | None:
    """The model's modules, on the meta device where they can be built there.

    tries: build the user's own model, too, with values if its code can't do without; else the result is None for it.
    """
    try:
        if isinstance(spec, MetaModel):
            return build_on_meta(spec)
        if tries:
            with torch.random.fork_rng(devices=[]):  # a program that checks a job keeps its random numbers
                try:
                    return build_on_meta(spec)
                except HpctrainError:
                    return spec.build()
    except HpctrainError as error:
        problems.append(PlacedProblem(("model", "name"), str(error), error.exit_code))
    except Exception as error:  # a third party's code: the report names it
        why = f"[model] name = {spec.name!r}: {raised_in(error, registry)}"
        problems.append(PlacedProblem(("model", "name"), why, EXIT_TRAINING))
    return None


def _try_optimizer(optimizer: Optimizer, problems: list[PlacedProblem], registry: Registry) -> None:
    """Build an optimizer for one parameter, and let it step."""
    try:
        build_optimizer(optimizer, [{"params": [nn.Parameter(torch.zeros(2, 2))]}])  # Muon takes matrices only
        refuse_hidden_state(optimizer, partial(build_optimizer, optimizer))
    except HpctrainError as error:
        if isinstance(error.__cause__, (TypeError, ValueError, type(None))):  # other errors: it may need a GPU
            problems.append(PlacedProblem(("optimizer", "name"), str(error), error.exit_code))
    except Exception as error:  # a third party's code: the report names it
        why = f"[optimizer] name = {optimizer.name!r}: {raised_in(error, registry)}"
        problems.append(PlacedProblem(("optimizer", "name"), why, EXIT_TRAINING))


def _unknown_names(names: Sequence[str], registry: Registry) -> list[PlacedProblem]:
    """Problems for unknown names in [plugins] block."""
    sources = (*entry_points(), *registry.sources) if names else ()  # the installed ones, and those of [plugins] load
    plugins = {name for source in sources for name in source.names}
    expected = "expected an entry point, a module or a distribution, as listed by `hpctrain plugins`"
    return [
        PlacedProblem.at(("plugins", "block", i), f"no installed or loaded plugin has the name {name!r}; {expected}")
        for i, name in enumerate(names)
        if name not in plugins
    ]
