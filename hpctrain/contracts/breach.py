"""The sentence about a plugin that breaks its contract."""

from __future__ import annotations

import importlib.metadata

from hpctrain.base.errors import ContractError
from hpctrain.contracts.plugin import Plugin

_FOREIGN = "hpctrain.plugins.user_code."


def broken(plugin: Plugin | type[Plugin], found: str, expected: str, everywhere: bool = False) -> ContractError:
    """The error to raise. found: a sentence without its subject. everywhere: every rank raises it."""
    return ContractError(f"{named(plugin)} {found}, expected {expected}", everywhere=everywhere)


def named(plugin: Plugin | type[Plugin]) -> str:
    """The plugin with its class, distribution and version; a user's own callable only with its reference."""
    cls = plugin if isinstance(plugin, type) else type(plugin)
    if cls.__module__.startswith(_FOREIGN):
        return f"{plugin.name!r}"
    package = cls.__module__.partition(".")[0]
    found = importlib.metadata.packages_distributions().get(package, ())
    version = "".join(f", {name} {importlib.metadata.version(name)}" for name in found[:1])
    return f"the plugin {plugin.name!r} ({cls.__module__}:{cls.__qualname__}{version})"
