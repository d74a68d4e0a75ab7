"""Asks each plugin of a job what it objects to in the job, and what it lacks on a machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpctrain.base.errors import EXIT_TRAINING, EnvironmentUnfitError, HpctrainError
from hpctrain.contracts.plan import Plan
from hpctrain.contracts.plugin import Machine, Plugin
from hpctrain.job.parts import Parts
from hpctrain.job.problems import PlacedProblem
from hpctrain.job.raw import dotted
from hpctrain.job.tables import Job
from hpctrain.job.toml import Key
from hpctrain.registry.blame import raised_in, retell_plugin_error
from hpctrain.registry.registry import Registry
from hpctrain.registry.slots import TABLES, Slot


@dataclass(frozen=True)
class Choice:
    """A plugin, and the key of the job that chose it."""

    key: Key
    plugin: Plugin
    value: str = ""
    """The value of the key; "" for an axis, whose key is its name."""
    table: Key = ()
    """The table that another plugin holds in place of the slot's own, whose keys the plugin's problems name."""

    def __str__(self) -> str:
        return dotted(self.key) + (f" = {self.value}" if self.value else "")


def placed(parts: Parts) -> Iterator[tuple[Slot, Key, Plugin]]:
    """Every plugin of a job with its slot and the place of its table, in the order of the slots."""
    for slot in TABLES:
        plugins = getattr(parts, f"{slot.name}s" if slot.many else slot.name)
        if slot.key is None:
            yield from ((slot, (slot.name, name), plugin) for name, plugin in plugins.items())
        elif slot.many:
            yield from ((slot, (slot.name, i), plugin) for i, plugin in enumerate(plugins))
        else:
            yield slot, (slot.name,), plugins


def choices(job: Job, parts: Parts) -> list[Choice]:
    """Every plugin of the job, in the order of the slots. A plugin chosen by another plugin's options follows that plugin."""
    every: list[Choice] = []
    for slot, table, plugin in placed(parts):
        if slot.key is None:
            choice = Choice(table, plugin)
        else:
            key, value = job.sharding.choice if slot.name == "sharding" else (slot.key, repr(plugin.name))
            choice = Choice((*table, key), plugin, value)
        every += [choice, *_inner(choice, table)]
    return every


def _inner(choice: Choice, table: Key) -> Iterator[Choice]:
    """The plugins that the options of a plugin with this `table` choose or hold."""
    for option, plugin in choice.plugin.chosen.items():
        yield Choice((*table, option), plugin, repr(plugin.name))
    for option, plugins in choice.plugin.held.items():
        for name, plugin in plugins.items():
            place = (*table, option, name)
            yield Choice((*place, "name"), plugin, repr(plugin.name), place)


def plugin_problems(job: Job, parts: Parts, plan: Plan, registry: Registry) -> list[PlacedProblem]:
    """The objections of all plugins to the job."""
    return [problem for choice in choices(job, parts) for problem in _problems_of(choice, plan, registry)]


def _problems_of(choice: Choice, plan: Plan, registry: Registry) -> list[PlacedProblem]:
    try:
        problems = choice.plugin.problems(plan)
    except HpctrainError as error:
        return [PlacedProblem(choice.key, str(error), error.exit_code)]
    except Exception as error:  # a third party's code: the report names it
        return [PlacedProblem(choice.key, f"{choice}: {raised_in(error, registry)}", EXIT_TRAINING)]
    placed = []
    for problem in problems:
        key: Key = tuple(problem.key.split(".")) if problem.key else choice.key
        if choice.table and problem.key and key[0] == choice.table[0]:
            key = (*choice.table, *key[1:])  # a plugin that another one holds doesn't know its own place
        what = "" if problem.is_sentence else f"{dotted(key)}: " if problem.key else f"{choice}: "
        placed.append(PlacedProblem(key, what + problem.why, problem.exit_code))
    return placed


def lacking(asked: Sequence[Choice], machine: Machine, registry: Registry) -> list[str]:
    """Requirements of plugins that `machine` lacks, as sentences. Raises TrainingError with the name of a plugin that raises."""
    try:
        answers = [(choice, choice.plugin.missing(machine)) for choice in asked]
    except HpctrainError:
        raise
    except Exception as error:
        retell_plugin_error(error, registry)
        raise
    return [f"{choice}: {why}" for choice, why in answers if why is not None]


def refuse_machine(job: Job, parts: Parts, machine: Machine, registry: Registry) -> None:
    """Raise EnvironmentUnfitError if the job's plugins lack something on `machine`. The communicator was asked before."""
    asked = [choice for choice in choices(job, parts) if choice.plugin is not parts.communicator]
    sentences = lacking(asked, machine, registry)
    if sentences:
        raise EnvironmentUnfitError("\n".join(sentences))
