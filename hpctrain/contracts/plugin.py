"""The base of every plugin: a name, and options with types and help. A plugin is a choice, not what runs (docs/decisions/0047).

With its questions and answers, and the error about a plugin that breaks its contract.
"""

from __future__ import annotations

import importlib.metadata
import re
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict

from hpctrain.base.errors import EXIT_USAGE, ContractError, HpctrainError
from hpctrain.contracts.identity import Identity

if TYPE_CHECKING:  # commands load plugins of schedulers without torch
    import torch

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_FOREIGN = "hpctrain.registry.user_code."


class Options(BaseModel):
    """The keys of a plugin's table in the job file: a pydantic model that refuses unknown keys.

    Give each field a type, a default where one makes sense, limits, and a `description` in `Field`: the job
    check, `hpctrain plugins show` and the JSON schema are made from them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


@dataclass(frozen=True)
class Problem:
    """A part of a job that a plugin can't do.

    why: the end of a sentence that says what was found, what was expected and what to do. key: the one to change, such as
    "batch.micro_size"; "" is the plugin's own place in the job. exit_code: 2, or 3 for software that is not installed.
    """

    why: str
    key: str = ""
    exit_code: int = EXIT_USAGE
    is_sentence: bool = False
    """Whether `why` is a whole sentence with the key in it."""

    @staticmethod
    def of(error: HpctrainError) -> Problem:
        """An error as a problem."""
        return Problem(str(error), exit_code=error.exit_code, is_sentence=True)


@dataclass(frozen=True)
class Machine:
    """The machine of a rank. device: None until a communicator has given the rank one."""

    identity: Identity
    device: torch.device | None = None


class Plugin(ABC):
    """Base of the classes that the registration hooks return; each slot has its own subclass.

    A plugin is a description: cheap to make, and without state. Its factory methods (`Sharding.shard`, `Precision.start`,
    `Parallelism.apply`, ...) make what runs, anew for each job.
    """

    name: ClassVar[str]
    """The plugin's name in the job file."""

    Options: ClassVar[type[Options]] = Options
    """The keys that its table may hold."""

    chooses: ClassVar[Mapping[str, str]] = {}
    """Options whose value is the name of a plugin of another slot: the option, and the slot.

    The constructor of such a plugin also takes `chosen`: the plugins by the options.
    """

    chosen: Mapping[str, Plugin] = MappingProxyType({})  # can't be changed: all plugins share it
    """The plugins that the options chose."""

    holds: ClassVar[Mapping[str, str]] = {}
    """Options whose value has tables of plugins of another slot by names of the user's: the option, and the slot.

    Such a table has the key `name`, which chooses a plugin, the keys of the option's own model, and the chosen plugin's options.
    The constructor also takes `held`.
    """

    held: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    """The plugins that the options hold, by option and name."""

    def __init__(
        self,
        options: Any,
        chosen: Mapping[str, Plugin] | None = None,
        held: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Keep the validated options (an instance of `Options`); must not communicate or build anything large."""
        self.options = options
        if chosen is not None:
            self.chosen = chosen
        if held is not None:
            self.held = held

    def problems(self, plan: Any) -> list[Problem]:
        """Problems of the job with this plugin. Asked once for each job, before anything is built.

        plan: a `Plan`; annotate it so in your class. A UsageError that this raises is reported as it is. Must not communicate.
        """
        return []  # `plan` has no type here: Plan holds plugins, and no two files import each other

    def missing(self, machine: Machine) -> str | None:
        """The need of this plugin that `machine` lacks, as the end of a sentence; None where it can run.

        Asked when a rank starts. `hpctrain check` also asks, and only notes the answer: the job may be for another machine.
        """
        return None

    def memory_advice(self, ranks: int, device: torch.device) -> list[str]:
        """Settings of this plugin's slot that would save memory and are not on, such as "[sharding] stage = 3, found 1".

        The cheapest first. Asked when a rank has run out of memory on `device`. ranks: the number with different samples.
        """
        return []


def parse_bytes(value: object) -> object:
    """Turn "500MB" or "64KiB" into bytes; other values go on to the type check unchanged."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError('expected a size in bytes such as 500000000, "500MB" or "64KiB"')
    size = float(match[1]) * _UNITS[match[2].upper()]
    if size >= 2**63:  # torch's sizes have 64 bits, with a sign
        raise ValueError("expected a size in bytes below 2**63")
    return round(size)


ByteSize = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=int | str)]
"""A size in bytes: an integer, or text with a unit (KB, MB, GB decimal; KiB, MiB, GiB binary)."""


def broken(plugin: Plugin | type[Plugin], fault: str, expected: str) -> ContractError:
    """The error about a plugin that breaks its contract. fault: a sentence without its subject."""
    return ContractError(f"{named(plugin)} {fault}, expected {expected}")


def named(plugin: Plugin | type[Plugin], with_version: bool = True) -> str:
    """The plugin with its class, distribution and version (which takes a third of a second); a user's callable by its reference."""
    cls = plugin if isinstance(plugin, type) else type(plugin)
    if cls.__module__.startswith(_FOREIGN):  # the class around it is hpctrain's own, and not to blame
        return f"{plugin.name!r}"
    package = cls.__module__.partition(".")[0]
    owners = importlib.metadata.packages_distributions().get(package, ()) if with_version else ()
    version = "".join(f", {name} {importlib.metadata.version(name)}" for name in owners[:1])
    return f"the plugin {plugin.name!r} ({cls.__module__}:{cls.__qualname__}{version})"
