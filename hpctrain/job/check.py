"""Checks a whole job against the core's tables and the installed plugins, and reports every problem at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel, ValidationError

from hpctrain.contracts.plugin import Options
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.foreign import as_plugin, is_reference
from hpctrain.job.parts import Parts
from hpctrain.job.problems import JobError, Problem, dotted, problems_of, validate
from hpctrain.job.reading import Key, RawJob
from hpctrain.job.tables import AxisTable, Job, LoggerTable, ParameterGroup
from hpctrain.mesh import layout_of
from hpctrain.plugins.registry import Registry, build_registry
from hpctrain.plugins.slots import SLOTS, Slot


@dataclass(frozen=True)
class CheckedJob:
    """A job that can be trained, with its plugins."""

    job: Job
    parts: Parts
    registry: Registry
    raw: RawJob


def check(raw: RawJob, world_size: int | None) -> CheckedJob:
    """Raises JobError with every problem of the job; with `world_size` the layout and the batch are checked, too."""
    loading = raw.tables.get("plugins")
    lists = {key: _texts(loading.get(key)) for key in ("load", "block")} if isinstance(loading, dict) else {}
    registry = build_registry(lists.get("load", ()), lists.get("block", ()))
    problems: list[Problem] = []
    job = _core_tables(raw, problems)
    made = _Maker(raw, registry, problems).make_all()
    if problems or job is None:
        raise JobError(raw, problems)
    parts = Parts(**made, **_installed(registry))
    if job.checkpoint.keep_best is not None and not job.evaluation.every_steps:
        why = "[checkpoint] keep_best: it goes by the evaluation loss; expected [evaluation] every_steps, found none"
        problems.append(Problem(("checkpoint", "keep_best"), why))
    problems += [*_token_problems(job, parts), *_compile_problems(job, parts)]
    if world_size is not None:
        problems += _layout_problems(job, parts, world_size)
    if problems:
        raise JobError(raw, problems)
    return CheckedJob(job, parts, registry, raw)


def table_class(slot: Slot) -> type[BaseModel]:
    """The core's model of a slot's table."""
    if slot.name == "parallelism":
        return AxisTable
    if slot.name == "logger":
        return LoggerTable
    annotation = Job.model_fields[slot.name].annotation
    assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation


def _texts(value: object) -> tuple[str, ...]:
    return tuple(v for v in value if isinstance(v, str)) if isinstance(value, list) else ()


def _core_tables(raw: RawJob, problems: list[Problem]) -> Job | None:
    try:
        job = validate(Job, raw.tables)
    except ValidationError as error:
        problems += problems_of(error, (), raw.tables, _core_keys)
        return None
    assert isinstance(job, Job)
    return job


def _core_keys(table: Key) -> list[str]:
    """The keys of one of the core's own tables; they lie no deeper than one level."""
    if not table:
        return [*Job.model_fields, "extends"]
    annotation = Job.model_fields[str(table[0])].annotation
    return list(annotation.model_fields) if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []


class _Maker:
    """Makes the plugin of every slot from the raw tables, collecting problems instead of stopping at the first."""

    def __init__(self, raw: RawJob, registry: Registry, problems: list[Problem]) -> None:
        self.raw, self.registry, self.problems = raw, registry, problems

    def make_all(self) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for slot in SLOTS.values():
            table = self.raw.tables.get(slot.name)
            if slot.name == "logger":
                rows = table if isinstance(table, list) else []
                made["loggers"] = [self._table(slot, row, (slot.name, i)) for i, row in enumerate(rows)]
            elif slot.name == "parallelism":
                made["parallelism"] = self._parallelism(slot, table if isinstance(table, dict) else {})
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
        field = table_class(slot).model_fields[slot.key]
        name = table.get(slot.key, None if field.is_required() else field.default)
        if name is None or isinstance(name, (dict, list, bool, float)):
            return None  # missing or of a wrong type: the core's table has said so
        return self._plugin(slot, str(name), table, key)

    def _plugin(self, slot: Slot, name: str, table: dict[str, Any], key: Key) -> Any:
        own = table_class(slot).model_fields
        options = {k: v for k, v in table.items() if k not in own}
        chooser = (*key, slot.key) if slot.key else key
        try:
            if slot.foreign and is_reference(name):
                return as_plugin(slot, name, table, options)
            cls = self.registry.find(slot.name, name).cls
        except HpctrainError as error:
            self.problems.append(Problem(chooser, f"{dotted(chooser)}: {error}", error.exit_code))
            return None
        validated = self._options(cls.Options, options, key, list(own), lambda k: self._owners(slot, k))
        try:
            return None if validated is None else cls(validated)
        except HpctrainError as error:  # it lacks something on this machine
            self.problems.append(Problem(chooser, f"{dotted(chooser)} = {name!r}: {error}", error.exit_code))
            return None

    def _owners(self, slot: Slot, option: str) -> str | None:
        """Which other plugins of the slot have the option, as a hint."""
        entries = sorted(self.registry.entries.items())
        names = [name for (kind, name), one in entries if kind == slot.name and option in one.cls.Options.model_fields]
        return f"an option of {slot.key} = {', '.join(names)}" if names and slot.key else None

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
            self.problems += problems_of(error, key, self.raw.tables, lambda _: [*model.model_fields, *own], owners)
            return None

    def _groups(self, optimizer: Any) -> list[dict[str, Any]]:
        """[[optimizer.groups]] with the options that they leave as they are."""
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


def _installed(registry: Registry) -> dict[str, Any]:
    """Every format and communicator that can be made without options."""
    return {"formats": registry.made("checkpoint"), "communicators": registry.made("communicator")}


def _layout_problems(job: Job, parts: Parts, world_size: int) -> list[Problem]:
    """The ranks must be a product, and the batch must divide over them."""
    problems: list[Problem] = []
    for name, plugin in parts.parallelism.items():
        axis: Key = ("parallelism", name)
        ask = partial(plugin.refuse, parts.model, job.parallelism[name].size)
        problems += _refusal(axis, dotted(axis), ask)
    try:
        layout = layout_of(job, parts, world_size)
    except HpctrainError as error:
        return [*problems, Problem(("parallelism",), str(error))]
    replicate = job.parallelism.get("replicate")
    if replicate is not None and layout.axes["dp_replicate"] != replicate.size:
        problems.append(
            Problem(
                ("parallelism", "replicate"),
                f"[parallelism] replicate: found {replicate.size}, but with [sharding] stage = {parts.sharding.name} all "
                f"{layout.data_ranks} data-parallel ranks hold the same; leave it out, or take a stage that shards",
            )
        )
    stage: Key = ("sharding", "stage")
    ask = partial(parts.sharding.refuse, parts.model, layout.axes)
    problems += _refusal(stage, f"{dotted(stage)} = {parts.sharding.name}", ask)
    compression: Key = ("compression", "name")
    ask = partial(parts.compression.refuse, parts.sharding, layout.model_axes)
    problems += _refusal(compression, f"{dotted(compression)} = {parts.compression.name!r}", ask)
    return [*problems, *_batch_problems(job, parts, layout.data_ranks)]


def _refusal(key: Key, what: str, ask: Callable[[], str | None]) -> list[Problem]:
    """What a plugin has against the job: the sentence that it returns, or an error that says where it is."""
    try:
        why = ask()
    except UsageError as error:
        return [Problem(key, str(error))]
    return [Problem(key, f"{what}: {why}")] if why else []


def _batch_problems(job: Job, parts: Parts, data_ranks: int) -> list[Problem]:
    """Whether a global batch of samples divides over the ranks, into micro batches that they can run.

    One of tokens divides over any, and an axis that minds the number of micro batches can't have it (`one_shape`).
    """
    size, micro_size = job.batch.global_size, job.batch.micro_size
    if size is None or micro_size is None:
        return []
    per_step = data_ranks * micro_size
    if size % per_step:
        near = max(per_step, round(size / per_step) * per_step)
        why = (
            f"[batch] global_size: {size} does not divide over {data_ranks} data-parallel ranks x micro_size {micro_size}; "
            f"expected a multiple of {per_step}, such as {near}"
        )
        return [Problem(("batch", "global_size"), why)]
    count, problems = size // per_step, []
    for name, plugin in parts.parallelism.items():
        what = f"[batch] micro_size: {micro_size} makes {count} micro batches per step; {name}"
        ask = partial(plugin.refuse_micro_batches, count, job.parallelism[name].size)
        problems += _refusal(("batch", "micro_size"), what, ask)
    return problems


def _token_problems(job: Job, parts: Parts) -> list[Problem]:
    """Batches by token budget need a model that can be padded, and axes that take micro batches of any shape."""
    if job.batch.tokens is None:
        return []
    instead = "use global_size and micro_size"
    problems = []
    if not parts.model.padding():
        why = f"the model {parts.model.name!r} does not say how to pad samples of different lengths (padding)"
        problems.append(Problem(("batch", "tokens"), f"[batch] tokens: {why}; {instead}"))
    for name, plugin in parts.parallelism.items():
        if plugin.one_shape:
            why = f"{name} needs micro batches of one shape, and those of a token budget differ"
            problems.append(Problem(("batch", "tokens"), f"[batch] tokens: {why}; {instead}, or {name} = 1"))
    return problems


def _compile_problems(job: Job, parts: Parts) -> list[Problem]:
    problems: list[Problem] = []
    for name, plugin in parts.parallelism.items() if job.compile.enabled else ():
        ask = partial(plugin.refuse_compile, parts.activation_checkpointing.is_compiled)
        problems += _refusal(("compile", "enabled"), f"[compile] enabled: {name}", ask)
    return problems
