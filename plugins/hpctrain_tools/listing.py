"""Lists the registry for people: a row per plugin, a line per option."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.cli.groups import OfferedCommand
from hpctrain.contracts.plugin import Plugin
from hpctrain.registry.entry_points import COMMAND
from hpctrain.registry.registry import Registry


@dataclass(frozen=True)
class Listed:
    """A plugin, or a module whose plugins are unknown."""

    slot: str
    name: str
    state: str
    distribution: str
    version: str
    entry_point: str
    module: str
    why: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class Option:
    """A key of a plugin's table."""

    key: str
    type: str
    default: str
    help: str


def list_plugins(registry: Registry) -> list[Listed]:
    """Active plugins by slot and name, then broken and blocked modules."""
    rows = [
        Listed(*key, "active", s.distribution, s.version, s.entry_point, s.module, registry.remarks.get(key, ""))
        for key, s in ((key, entry.source) for key, entry in sorted(registry.entries.items()))
    ]
    told = {row.module for row in rows} | {fault.source.module for fault in registry.faults}
    rows += [  # modules with only life-cycle hooks
        Listed("", "", "active", s.distribution, s.version, s.entry_point, s.module, "life-cycle hooks")
        for s in registry.sources
        if s.module not in told
    ]
    for fault in registry.faults:
        s = fault.source
        slot, _, name = ".".join(fault.key or (s.entry_point,)).partition(".")
        rows.append(Listed(slot, name, fault.state, s.distribution, s.version, s.entry_point, s.module, fault.why))
    return rows


def list_commands(offers: Sequence[OfferedCommand]) -> list[Listed]:
    """The commands that plugins add; each is imported."""
    rows = []
    for offer in offers:
        s, state, why = offer.source, "active", ""
        try:
            offer.load()
        except EnvironmentUnfitError as error:
            state, why = "broken", str(error)
        rows.append(Listed(COMMAND, str(s.command), state, s.distribution, s.version, s.entry_point, s.module, why))
    return rows


def options_schema(plugin: type[Plugin], registry: Registry) -> dict[str, Any]:
    """The JSON schema of a plugin's options. An option that chooses a plugin lists the installed names."""
    schema = plugin.Options.model_json_schema(ref_template="#/$defs/{model}")
    for option, slot in plugin.chooses.items():
        schema["properties"][option]["enum"] = registry.names(slot)
    return schema


def describe_options(plugin: type[Plugin], registry: Registry) -> list[Option]:
    """The options, from their JSON schema, so that help and checks agree."""
    return describe_keys(options_schema(plugin, registry))


def describe_keys(schema: dict[str, Any]) -> list[Option]:
    """The keys of a table or of a plugin's options, from its JSON schema."""
    required = schema.get("required", [])
    return [
        Option(
            key,
            _type(info, schema.get("$defs", {})),
            "required" if key in required else f"default {_toml(info.get('default'))}",
            info.get("description", ""),
        )
        for key, info in schema.get("properties", {}).items()
    ]


def _type(info: dict[str, Any], definitions: dict[str, Any]) -> str:
    """ "integer >= 1", "number or null", "one of 'a', 'b'" """
    if "$ref" in info:
        return _type(definitions[info["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in info:
        return " or ".join(_type(option, definitions) for option in info["anyOf"] if option.get("type") != "null")
    if "enum" in info:
        return "one of " + ", ".join(map(repr, info["enum"]))
    limits = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {info[name]:g}" for name, sign in limits.items() if name in info]
    return " ".join([str(info.get("type", "any")), *bounds])


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "unset" if value is None else repr(value).replace("'", '"')
