"""Checks a whole job against the core's tables and the installed plugins, and reports every problem at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from hpctrain.base.errors import EXIT_TRAINING, HpctrainError, UsageError
from hpctrain.base.torch_private import delay_compiler
from hpctrain.checking.choices import plugin_problems
from hpctrain.checking.combinations import combination_problems
from hpctrain.checking.stand_ins import further_problems, register_stand_in
from hpctrain.checking.trial import build_outline, open_outside, try_optimizer
from hpctrain.contracts.identity import Identity
from hpctrain.contracts.plan import Plan
from hpctrain.contracts.plugin import Options
from hpctrain.job.parts import Parts
from hpctrain.job.problems import JobError, PlacedProblem, problems_of, validate
from hpctrain.job.reading import Key, RawJob, dotted
from hpctrain.job.tables import Job
from hpctrain.job.training_tables import ParameterGroup
from hpctrain.model.mesh import Layout, layout_of, plan_of
from hpctrain.plugins.blame import raised_in, retell_plugin_error
from hpctrain.plugins.registry import Registry, build_registry
from hpctrain.plugins.slots import SLOTS, TABLES, Slot, table_class
from hpctrain.plugins.user_code import as_plugin, is_reference
from hpctrain.ranks.detection import torchrun_variables

_LIMIT = ("job", "time_limit")
_DEEPEST = 3
"""How many times a check replaces wrong values to look behind them."""


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
        try:
            return _check(raw, world_size, tries)
        except JobError as error:
            again = raw.with_texts(problem.key for problem in error.problems if problem.wants_text)
            if again is None:
                raise
        return _check(again, world_size, tries)


def _check(raw: RawJob, world_size: int | None, tries: bool, depth: int = 0) -> CheckedJob:
    """depth: how many times wrong values of the job were replaced."""
    loading = raw.tables.get("plugins")
    lists = {key: _texts(loading.get(key)) for key in ("load", "block", "prefer")} if isinstance(loading, dict) else {}
    registry = build_registry(*(lists.get(key, ()) for key in ("load", "block", "prefer")))
    if depth:
        register_stand_in(registry)
    problems = [one for key in ("block", "prefer") for one in _name_problems(key, lists.get(key, ()), registry)]
    job = _core_tables(raw, problems)
    made = _Maker(raw, registry, problems).make_all()
    if problems or job is None:
        if depth < _DEEPEST:
            problems += _further(raw, problems, world_size, tries, registry, depth)
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
    if tries and (problems or depth):  # else the caller opens them
        problems += open_outside(job, parts)[1]
    if problems:
        raise JobError(raw, problems)
    return CheckedJob(job, parts, registry, raw, plan)


def _further(
    raw: RawJob, found: Sequence[PlacedProblem], world_size: int | None, tries: bool, registry: Registry, depth: int
) -> list[PlacedProblem]:
    """Find what else is wrong with a job that has wrong values."""
    if any(problem.key[:1] == ("parallelism",) for problem in found):
        world_size = None  # without the axis that was meant the layout would be another one

    register_stand_in(registry)

    def of_values(raw: RawJob) -> None:
        problems: list[PlacedProblem] = []
        _core_tables(raw, problems)
        _Maker(raw, registry, problems).make_all()
        if problems:
            raise JobError(raw, problems)

    def rest(raw: RawJob) -> None:
        _check(raw, world_size, tries, depth + 1)

    return further_problems(raw, found, of_values, rest, registry)


def _layout(job: Job, parts: Parts, world_size: int | None, problems: list[PlacedProblem]) -> Layout | None:
    try:
        return None if world_size is None else layout_of(job, parts, world_size)
    except UsageError as error:
        problems.append(PlacedProblem(("parallelism",), str(error)))
        return None


def _name_problems(key: str, names: Sequence[str], registry: Registry) -> list[PlacedProblem]:
    """Problems for unknown names in [plugins] block or prefer."""
    sources = [*registry.sources, *(fault.source for fault in registry.faults)]
    known = {name for one in sources for name in one.names}
    unknown = [(i, name) for i, name in enumerate(names) if name not in known]
    return [
        PlacedProblem(
            ("plugins", key, i),
            f"[plugins] {key}: no installed or loaded plugin has the name {name!r}; expected an entry point, a module or a "
            "distribution, as listed by `hpctrain plugins`",
        )
        for i, name in unknown
    ]


def _texts(value: object) -> tuple[str, ...]:
    return tuple(v for v in value if isinstance(v, str)) if isinstance(value, list) else ()


def _core_tables(raw: RawJob, problems: list[PlacedProblem]) -> Job | None:
    if _LIMIT in raw.texts and isinstance(raw.tables["job"]["time_limit"], int | float):
        why = "a number in a job file is in seconds, Slurm's in minutes"
        problems.append(
            PlacedProblem(
                _LIMIT, f"[job] time_limit: expected a unit, such as 10m or 600s, found {raw.texts[_LIMIT]}: {why}"
            )
        )
    try:
        job = validate(Job, raw.tables)
    except ValidationError as error:
        problems += problems_of(error, (), raw.tables, _core_keys)
        return None
    assert isinstance(job, Job)
    return job


def _core_keys(table: Key) -> list[str]:
    """The keys of one of the core's tables, or of a table in one."""
    if not table:
        return [*Job.model_fields, "extends"]
    fields = Job.model_fields
    for key in (key for key in table if isinstance(key, str)):
        annotation = fields[key].annotation if key in fields else None
        parts = (getattr(one, "__origin__", one) for one in (annotation, *get_args(annotation)))  # without Annotated
        inner = [one for one in parts if isinstance(one, type)]
        fields = next((one.model_fields for one in inner if issubclass(one, BaseModel)), {})
    return list(fields)


class _Maker:
    """Makes the plugin of every slot from the raw tables, collecting problems instead of stopping at the first."""

    def __init__(self, raw: RawJob, registry: Registry, problems: list[PlacedProblem]) -> None:
        self.raw, self.registry, self.problems = raw, registry, problems

    def make_all(self) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for slot in TABLES:
            table = self.raw.tables.get(slot.name)
            if slot.many:
                rows = table if isinstance(table, list) else []
                made[f"{slot.name}s"] = [self._table(slot, row, (slot.name, i)) for i, row in enumerate(rows)]
            elif slot.name == "parallelism":
                made["parallelism"] = self._parallelism(slot, table if isinstance(table, dict) else {})
            elif slot.key is None:
                tables = table.items() if isinstance(table, dict) else ()
                inner = [(name, own) for name, own in tables if isinstance(own, dict)]
                made[slot.name] = {name: self._plugin(slot, name, own, (slot.name, name)) for name, own in inner}
            elif table is None or isinstance(table, dict):
                made[slot.name] = self._table(slot, table or {}, (slot.name,))
        made["optimizer_groups"] = self._groups(made.get("optimizer"))
        return made

    def _parallelism(self, slot: Slot, table: dict[str, Any]) -> dict[str, Any]:
        axes = {name: value if isinstance(value, dict) else {"size": value} for name, value in table.items()}
        self._options(
            Options,
            {k: v for k, v in axes.pop("replicate", {}).items() if k != "size"},
            (slot.name, "replicate"),
            ["size"],
        )
        made = {name: self._plugin(slot, name, value, (slot.name, name)) for name, value in axes.items()}
        return {name: plugin for name, plugin in made.items() if axes[name].get("size") != 1}

    def _table(self, slot: Slot, table: Any, key: Key) -> Any:
        if not isinstance(table, dict):
            return None
        assert slot.key is not None
        if slot.numbered is not None and slot.key not in table:
            short, prefix = slot.numbered
            number = table.get(short, 0)
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                return None  # the core's table has reported it
            return self._plugin(slot, f"{prefix}{number}", table, key, short)
        field = table_class(slot).model_fields[slot.key]
        name = table.get(slot.key, None if field.is_required() else field.default)
        if not isinstance(name, str):
            return None  # missing or of a wrong type: the core's table has reported it
        return self._plugin(slot, name, table, key, slot.key)

    def _plugin(self, slot: Slot, name: str, table: dict[str, Any], key: Key, chosen_by: str | None = None) -> Any:
        own = table_class(slot).model_fields
        options = {k: v for k, v in table.items() if k not in own}
        chooser = (*key, chosen_by) if chosen_by else key
        try:
            if slot.takes_user_code and is_reference(name):
                return as_plugin(slot, name, table, options)
            cls: Any = self.registry.find(slot.name, name).cls
        except HpctrainError as error:
            self.problems.append(PlacedProblem(chooser, f"{dotted(chooser)}: {error}", error.exit_code))
            return None
        validated = self._options(cls.Options, options, key, list(own), lambda k: self._owners(slot, k))
        if validated is None:
            return None
        try:
            return self.registry.make(cls, validated) if self._are_known(cls, validated, key) else None
        except HpctrainError as error:
            self.problems.append(PlacedProblem(chooser, f"{dotted(chooser)} = {name!r}: {error}", error.exit_code))
        except Exception as error:  # a third party's code: the report names it
            why = raised_in(error, self.registry)
            self.problems.append(PlacedProblem(chooser, f"{dotted(chooser)} = {name!r}: {why}", EXIT_TRAINING))
        return None

    def _are_known(self, cls: Any, options: BaseModel, key: Key) -> bool:
        """Whether the plugins that options name exist."""
        for option, slot in cls.chooses.items():
            try:
                self.registry.find(slot, getattr(options, option))
            except HpctrainError as error:
                place = (*key, option)
                self.problems.append(PlacedProblem(place, f"{dotted(place)}: {error}", error.exit_code))
                return False
        return True

    def _owners(self, slot: Slot, option: str) -> str | None:
        """A hint: the other plugins of the slot that have the option."""
        entries = sorted(self.registry.entries.items())
        names = [name for (kind, name), one in entries if kind == slot.name and option in one.cls.Options.model_fields]
        if not names or not slot.key:
            return None
        short, prefix = slot.numbered or ("", "")
        if short and all(name.startswith(prefix) for name in names):
            return f"an option of {short} = {', '.join(name.removeprefix(prefix) for name in names)}"
        return f"an option of {slot.key} = {', '.join(names)}"

    def _options(
        self,
        model: type[Options],
        options: dict[str, Any],
        key: Key,
        own: list[str],
        owners: Callable[[str], str | None] = lambda _: None,
    ) -> BaseModel | None:
        try:
            return validate(model, options)
        except ValidationError as error:
            known = partial(_option_keys, model, own)
            self.problems += problems_of(error, key, self.raw.tables, known, owners)
            return None

    def _groups(self, optimizer: Any) -> list[dict[str, Any]]:
        """[[optimizer.groups]], completed with the optimizer's options that a group does not set."""
        table = self.raw.tables.get("optimizer")
        if optimizer is None or not isinstance(table, dict) or not isinstance(table.get("groups", []), list):
            return []
        own = [*table_class(SLOTS["optimizer"]).model_fields]
        common = {k: v for k, v in table.items() if k not in own}
        groups = []
        for i, group in enumerate(table.get("groups", [])):
            if not isinstance(group, dict) or "pattern" not in group:
                continue
            different = {k: v for k, v in group.items() if k not in ParameterGroup.model_fields}
            key: Key = ("optimizer", "groups", i)
            options = self._options(optimizer.Options, {**common, **different}, key, ["pattern"])
            pattern = group["pattern"]
            values = {} if options is None else options.model_dump()
            groups.append({"pattern": [pattern] if isinstance(pattern, str) else pattern, **values})
        return groups


def _option_keys(model: type[BaseModel], own: Sequence[str], below: Key) -> list[str]:
    """The keys of a plugin's table, or of a table `below` it. own: the core's keys of the same table."""
    if not below:
        return [*model.model_fields, *own]
    if isinstance(below[0], int):  # a row of a list of tables
        return _option_keys(model, own, below[1:])
    field = model.model_fields.get(str(below[0]))
    kinds = (field.annotation, *get_args(field.annotation)) if field else ()
    inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
    return _option_keys(inner, (), below[1:]) if inner else []


def _installed(registry: Registry) -> dict[str, Any]:
    """Every format and communicator that can be made without options."""
    return {"formats": registry.made("checkpoint"), "communicators": registry.made("communicator")}
