"""Descriptions that a plugin gives of itself: its docstring, options and imports, and the hooks that its module has."""

from __future__ import annotations

import ast
import inspect
import sys
from contextlib import suppress

from pydantic import ValidationError

from hpctrain_tools.testing.hook import hooks_of_steps
from hpctrain_tools.testing.kit import Kit

# modules of hpctrain whose every name is public
_PUBLIC = ("api", "toolkit", "testing")


def describe(kit: Kit) -> None:
    """Examine promises of every plugin."""
    plugin = kit.plugin
    if not (plugin.__doc__ or "").strip():
        kit.breaks("has a sentence for `hpctrain plugins show`", "its class has no docstring")
    private = [name for name in _imported(plugin.__module__) if not _is_public(name)]
    if private:
        kit.breaks(
            "imports what is public only",
            f"{plugin.__module__} imports {private[0]}, expected hpctrain.api or hpctrain.toolkit",
        )
    called = [] if kit.modules else hooks_of_steps(sys.modules[plugin.__module__])
    if called:  # of an installed module
        kit.breaks(
            "costs a job that doesn't choose it nothing",
            f"{plugin.__module__} has the function {called[0]}, which each step of every job calls; expected a method of what a "
            "Hook's start() returns",
        )
    silent = [key for key, field in plugin.Options.model_fields.items() if not field.description]
    if silent:
        kit.breaks("describes each option", f"{', '.join(silent)} has no description in Field")
    with suppress(ValidationError):
        plugin.Options(**{**dict(kit.options), "no_such_option": 1})
        kit.breaks("refuses unknown options", "its Options take no_such_option = 1")


def _imported(module: str) -> list[str]:
    """The names of hpctrain's that a module imports, such as "hpctrain.mpi.Settings"."""
    found = []
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        if isinstance(node, ast.Import):
            found += [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            found += [f"{node.module}.{one.name}" for one in node.names]
    return [name for name in found if name.startswith("hpctrain.")]


def _is_public(name: str) -> bool:
    """Whether a name is of the interface of plugins, or in `__all__` of its module."""
    if name.split(".")[1] in _PUBLIC:
        return True
    module, _, last = name.rpartition(".")
    return last in getattr(sys.modules.get(module), "__all__", ())
