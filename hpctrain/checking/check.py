"""Checks a whole job against the core's tables and the installed plugins, and reports every problem at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import ValidationError

from hpctrain.base.errors import HpctrainError, UsageError
from hpctrain.base.torch_private import delay_compiler
from hpctrain.checking.choices import plugin_problems
from hpctrain.checking.combinations import combination_problems
from hpctrain.checking.making import PartsMaker
from hpctrain.checking.trial import build_outline, open_outside, try_optimizer
from hpctrain.contracts.identity import Identity
from hpctrain.contracts.plan import Plan
from hpctrain.job.parts import Parts
from hpctrain.job.problems import JobError, PlacedProblem, keys_below, problems_of, validate
from hpctrain.job.raw import RawJob
from hpctrain.job.tables import Job
from hpctrain.model.mesh import Layout, layout_of, plan_of
from hpctrain.plugins.blame import retell_plugin_error
from hpctrain.plugins.entry_points import entry_points
from hpctrain.plugins.registry import Registry, build_registry
from hpctrain.plugins.slots import OPTIONAL
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
    asked = {*raw.tables, *({"pipeline_schedule"} if "parallelism" in raw.tables else ())}
    registry = build_registry(lists.get("load", ()), lists.get("block", ()), OPTIONAL - asked)
    problems = _unknown_names(lists.get("block", ()), registry)
    job = _core_tables(raw, problems)
    made = PartsMaker(raw, registry, problems).make_all()
    if problems or job is None:
        raise JobError(raw, problems)
    parts = Parts(**made, **_installed(registry))
    outline = build_outline(parts.model, problems, tries, registry)
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
        try_optimizer(parts.optimizer, problems, registry)
    if tries and problems:  # else the caller opens them
        problems += open_outside(job, parts, plan.outline)[1]
    if problems:
        raise JobError(raw, problems)
    return CheckedJob(job, parts, registry, raw, plan)


def _layout(job: Job, parts: Parts, world_size: int | None, problems: list[PlacedProblem]) -> Layout | None:
    try:
        return None if world_size is None else layout_of(job, parts, world_size)
    except UsageError as error:
        problems.append(PlacedProblem(("parallelism",), str(error)))
        return None


def _unknown_names(names: Sequence[str], registry: Registry) -> list[PlacedProblem]:
    """Problems for unknown names in [plugins] block."""
    known = {name for one in (*entry_points(), *registry.sources) for name in one.names} if names else set()
    unknown = [(i, name) for i, name in enumerate(names) if name not in known]
    return [
        PlacedProblem(
            ("plugins", "block", i),
            f"[plugins] block: no installed or loaded plugin has the name {name!r}; expected an entry point, a module or a "
            "distribution, as listed by `hpctrain plugins`",
        )
        for i, name in unknown
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
