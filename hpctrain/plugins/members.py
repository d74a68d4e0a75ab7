"""Compares what a plugin's classes define with their contracts: methods that nobody calls look like working ones.

Names of a plugin's own are its business. A name counts as meant for hpctrain if the class overrides nothing with it, no code of
the plugin's own package reads it, and it is a name of an earlier contract, or close to one that the class leaves as it is. In a
module that states no version, a method with name and parameters of an earlier contract counts even where the package calls it.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from types import CodeType, FunctionType, ModuleType
from typing import Any

from pydantic import BaseModel

from hpctrain.plugins.changes import API_VERSION, FIRST_RELEASED, changes_of

_CONTRACTS = ("hpctrain.contracts.", "hpctrain.toolkit.")
_CLOSE = 0.8
"""How similar a name is to one that was meant, as difflib counts."""


@dataclass(frozen=True)
class Findings:
    """faults: the class does not do what it seems to promise. remarks: it may not."""

    faults: list[str]
    remarks: list[str]


class Package:
    """The code that belongs to a plugin: the loaded modules of its top-level package."""

    def __init__(self, module: str) -> None:
        self.top = module.partition(".")[0]
        self._findings: dict[tuple[type, int | None], Findings] = {}

    def findings(self, cls: type, version: int | None) -> Findings:
        """Compare `cls` with its contracts. version: the one that its module states."""
        if (cls, version) not in self._findings:
            self._findings[cls, version] = _judge(cls, self, version)
        return self._findings[cls, version]

    def has(self, module: str) -> bool:
        """Whether the module with this name belongs to the package."""
        return module == self.top or module.startswith(f"{self.top}.")

    @cached_property
    def uses(self) -> set[str]:
        """The names that its code reads, except those that only a function of the same name reads."""
        modules = [name for name in list(sys.modules) if self.has(name)]
        return {used for name in modules for used in _read(_code(name), frozenset())}

    def classes(self, module: ModuleType) -> list[type]:
        """The classes of contracts that the module defines or imports from its package, also through other modules of it."""
        seen, waiting, found = set(), [module], []
        while waiting:
            one = waiting.pop()
            if one.__name__ in seen:
                continue
            seen.add(one.__name__)
            for value in list(vars(one).values()):
                name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
                if isinstance(name, str) and self.has(name) and name in sys.modules:
                    waiting.append(sys.modules[name])
                if isinstance(value, type) and value.__module__ == one.__name__ and contracts_of(value):
                    found.append(value)
        return found


def contracts_of(cls: type) -> list[type]:
    """The classes of hpctrain's that `cls` implements, the nearest first."""
    if issubclass(cls, BaseModel):
        return []
    return [base for base in cls.__mro__[1:] if base.__module__.startswith(_CONTRACTS)]


def _judge(cls: type, package: Package, version: int | None) -> Findings:
    contracts, since = contracts_of(cls), FIRST_RELEASED if version is None else version
    names = {contract.__name__ for contract in contracts}
    own = [base for base in cls.__mro__ if package.has(base.__module__) and base not in contracts]
    others = [base for base in cls.__mro__ if base not in own]
    defined = {name: value for base in reversed(own) for name, value in vars(base).items() if not name.startswith("_")}
    faults, former, remarks = [], [], []
    for name, value in defined.items():
        promised = next((base for base in others if name in vars(base) or name in inspect.get_annotations(base)), None)
        changes = changes_of(names, name)
        if promised is not None:
            faults += [
                f"`{name}` has changed in plugin API version {c.version}: {c.instead}"
                for c in changes
                if c.version > since
            ]
            wrong = _misfit(value, vars(promised)[name]) if name in vars(promised) else None
            if wrong is not None:
                faults.append(f"`{name}` {wrong}" + "".join(f" ({change.instead})" for change in changes[-1:]))
        elif changes:
            meant = (
                version is None and changes[-1].parameters is not None and changes[-1].parameters == _parameters(value)
            )
            former += [(name, changes[-1].instead)] if meant or name not in package.uses else []
        else:
            near = _near(cls, name, contracts, defined)
            remarks += near if near and name not in package.uses else []
    for instead in dict.fromkeys(instead for _, instead in former):
        gone = ", ".join(f"`{name}`" for name, why in former if why == instead)
        faults.append(f"plugin API version {API_VERSION} does not call {gone}: {instead}")
    return Findings(faults, remarks)


def missing_members(cls: type) -> list[str]:
    """The abstract members that `cls` lacks, each with a name of the class that may be meant."""
    lacking = sorted(getattr(cls, "__abstractmethods__", ()))
    if not lacking:
        return []
    contracts = {base.__name__ for base in contracts_of(cls)}
    others = [name for name in dir(cls) if name[0] != "_" and name not in lacking and not changes_of(contracts, name)]
    near = {name: get_close_matches(name, others, 1, _CLOSE) for name in lacking}
    return [name + (f" (it has {near[name][0]})" if near[name] else "") for name in lacking]


def unmarked_hooks(holder: object, hooks: list[str], package: Package) -> list[str]:
    """Sentences about functions of a module or an object that look like hooks, and that pluggy does not see."""
    said = []
    for name in (one for one in dir(holder) if one.startswith("hpctrain_")):
        value = inspect.getattr_static(holder, name)
        if not isinstance(value, FunctionType) or hasattr(value, "hpctrain_impl"):
            continue
        meant = near_hook(name, hooks)
        if meant is None or name in package.uses:
            continue
        if name in hooks:
            said.append(f"it has the function {name!r} without the mark of hpctrain.api.hookimpl, so nobody calls it")
        else:
            said.append(
                f"it has the function {name!r}, which is no hook; did you mean {meant!r}, marked with hookimpl?"
            )
    return said


def near_hook(name: str, hooks: list[str]) -> str | None:
    """The hook that resembles `name`. All names begin with "hpctrain_"."""
    bare = {hook.partition("_")[2]: hook for hook in hooks}
    found = get_close_matches(name.partition("_")[2], bare, 1, _CLOSE)
    return bare[found[0]] if found else None


def _near(cls: type, name: str, contracts: list[type], defined: dict[str, Any]) -> list[str]:
    """A remark if `name` resembles a member of the contracts that the class leaves as it is."""
    members = {one for base in contracts for one in vars(base) if not one.startswith("_")} - defined.keys()
    plain = {one.replace("_", ""): one for one in members}
    meant = get_close_matches(name.replace("_", "").lower(), plain, 1, _CLOSE)
    if not meant:
        return []
    base = next(base.__name__ for base in contracts if plain[meant[0]] in vars(base))
    return [f"{cls.__qualname__} has {name!r}, which nobody calls; did you mean {base}.{plain[meant[0]]}?"]


def _misfit(value: Any, promised: Any) -> str | None:
    """The reason why `value` can't stand for a contract's `promised` member, as the end of a sentence."""
    if isinstance(promised, (property, cached_property)):
        return "must be a property or a value, found a method" if isinstance(value, FunctionType) else None
    if not isinstance(promised, FunctionType):
        data = not callable(promised) and not hasattr(promised, "__get__")
        return "must be a value, found a method" if data and isinstance(value, FunctionType) else None
    if isinstance(value, property) or not (callable(value) or hasattr(value, "__get__")):
        return f"must be a method, found {'a property' if isinstance(value, property) else repr(value)}"
    bound = 0 if isinstance(value, staticmethod) else 1
    function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    if not isinstance(function, FunctionType):
        return None
    expected = list(inspect.signature(promised).parameters)[1:]
    actual = inspect.signature(function)
    try:
        actual.bind(*[None] * (bound + len(expected)))
    except TypeError:
        return f"is called with ({', '.join(expected)}), and takes ({', '.join(list(actual.parameters)[bound:])})"
    return None


def _parameters(value: object) -> tuple[str, ...] | None:
    """The names of a method's parameters, without self; None for anything else."""
    return tuple(inspect.signature(value).parameters)[1:] if isinstance(value, FunctionType) else None


def _code(module: str) -> CodeType | None:
    """The code of a loaded module; None if its loader has none, as for a module without a file."""
    get_code = getattr(getattr(getattr(sys.modules[module], "__spec__", None), "loader", None), "get_code", None)
    try:
        found = get_code(module) if get_code is not None else None
    except (ImportError, OSError, SyntaxError):  # the file has changed or is gone
        return None
    return found if isinstance(found, CodeType) else None


_READS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "LOAD_NAME", "LOAD_GLOBAL", "IMPORT_FROM")


def _read(code: CodeType | None, inside: frozenset[str]) -> Iterator[str]:
    """The names that code reads, and that are not those of the functions around."""
    if code is None:
        return
    for one in dis.get_instructions(code):
        if one.opname in _READS and one.argval not in inside:
            yield str(one.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _read(constant, inside | {constant.co_name})
