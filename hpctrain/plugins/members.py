"""Compares what a plugin's classes define with their contracts: methods that nobody calls look like working ones.

Names of a plugin's own are its business. A name counts as meant for hpctrain if the class overrides nothing with it, no code of
the plugin's own package reads it, and it is a name of an earlier contract, or close to one that the class leaves as it is. In a
module that states no version, or an earlier one, a method with name and parameters of an earlier contract counts even where the
package calls it. Where code of the package can't be read, other names of earlier contracts are remarks.
"""

from __future__ import annotations

import dis
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from types import CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import BaseModel

from hpctrain.contracts.plugin import Plugin
from hpctrain.plugins.changes import API_VERSION, FIRST_RELEASED, changes_of

_CONTRACTS = ("hpctrain.contracts.", "hpctrain.toolkit.")
_NOT_CALLED = f"which plugin API version {API_VERSION} does not call"
_CLOSE = 0.8
"""How similar a name is to one that was meant, as difflib counts."""
_READS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "LOAD_NAME", "LOAD_GLOBAL", "IMPORT_FROM")


@dataclass(frozen=True)
class Findings:
    """faults: the class does not do what it seems to promise. remarks: it may not."""

    faults: list[str]
    remarks: list[str]


class _Named(dict[str, list[CodeType]]):
    """Code by the names in it."""


class Package:
    """The code that belongs to a plugin: the loaded modules of its top-level package."""

    def __init__(self, module: str) -> None:
        self.top = module.partition(".")[0]
        self._findings: dict[tuple[type, int | None], Findings] = {}
        self._reads: dict[str, bool] = {}

    def findings(self, cls: type, version: int | None) -> Findings:
        """Compare `cls` with its contracts. version: the one that its module states."""
        if (cls, version) not in self._findings:
            self._findings[cls, version] = _judge(cls, self, version)
        return self._findings[cls, version]

    def has(self, module: str) -> bool:
        """Whether the module with this name belongs to the package."""
        return module == self.top or module.startswith(f"{self.top}.")

    @property
    def modules(self) -> list[ModuleType]:
        """The package's modules that are loaded."""
        top, inside = self.top, f"{self.top}."
        loaded = sys.modules.copy().items()  # a thread may import meanwhile
        found = [one for name, one in loaded if name == top or name.startswith(inside)]
        return [one for one in found if isinstance(one, ModuleType)]

    @cached_property
    def _named(self) -> list[_Named | None]:
        """The names in each of its modules; None for one that is not loaded, or not Python's."""
        loaded = {module.__name__: list(vars(module).get("__path__", ())) for module in self.modules}
        there = {info.name for name, folders in loaded.items() for info in pkgutil.iter_modules(folders, f"{name}.")}
        return [_named_in(module) for module in self.modules] + [None] * len(there - loaded.keys())

    def reads(self, name: str) -> bool:
        """Whether the code of its loaded modules reads `name`."""
        if name not in self._reads:  # instructions are read for few names: those of a package take half a second
            codes = [code for named in self._named if named is not None for code in named.get(name, ())]
            self._reads[name] = any(_reads(code, name) for code in codes)
        return self._reads[name]

    @property
    def is_known(self) -> bool:
        """Whether `reads` knows all of the package: its modules are loaded, and their code can be read."""
        return None not in self._named

    def parts(self) -> list[type]:
        """The classes of contracts in its loaded modules that are no plugins themselves: plugins make them."""
        classes = [
            one
            for module in self.modules
            for one in list(vars(module).values())
            if isinstance(one, type) and one.__module__ == module.__name__
        ]
        return [one for one in classes if contracts_of(one) and not issubclass(one, Plugin)]


def contracts_of(cls: type) -> list[type]:
    """The classes of hpctrain's that `cls` implements, the nearest first."""
    if issubclass(cls, BaseModel):
        return []
    return [base for base in cls.__mro__[1:] if _is_contract(base)]


def _is_contract(cls: type) -> bool:
    return cls.__module__.startswith(_CONTRACTS)


def _judge(cls: type, package: Package, version: int | None) -> Findings:
    contracts, since = contracts_of(cls), FIRST_RELEASED if version is None else version
    names = {contract.__name__ for contract in contracts}
    own = [base for base in cls.__mro__ if package.has(base.__module__) and base not in contracts]
    others = [base for base in cls.__mro__ if base not in own]
    defined = {name: value for base in reversed(own) for name, value in vars(base).items() if not name.startswith("_")}
    faults, former, remarks = [], [], []
    for name, value in defined.items():
        changes = changes_of(names, name)
        if any(name in vars(base) or (_is_contract(base) and name in inspect.get_annotations(base)) for base in others):
            faults += [
                f"`{name}` has changed in plugin API version {c.version}: {c.instead}"
                for c in changes
                if c.version > since
            ]
            promised = next((vars(base)[name] for base in contracts if name in vars(base)), None)
            wrong = None if promised is None else _misfit(value, promised)
            if wrong is not None:
                faults.append(f"`{name}` {wrong}" + "".join(f" ({change.instead})" for change in changes[-1:]))
        elif changes:
            last = changes[-1]
            is_older = version is None or version < last.version
            is_old = is_older and last.parameters is not None and last.parameters == _parameters(value)
            used = package.reads(name)
            if is_old or (not used and package.is_known):
                former.append((name, last.instead))
            elif not used:
                remarks.append(f"{cls.__qualname__} has {name!r}, {_NOT_CALLED}: {last.instead}")
        else:
            near = _near(cls, name, contracts, defined)
            remarks += near if near and not package.reads(name) else []
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
        value = inspect.getattr_static(holder, name, None)  # a module may make its names when asked
        if not isinstance(value, FunctionType) or hasattr(value, "hpctrain_impl"):
            continue
        meant = near_hook(name, hooks)
        if meant is None or package.reads(name):
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
    actual = inspect.signature(function, follow_wrapped=False)
    try:
        actual.bind(*[None] * (bound + len(expected)))
    except TypeError:
        taken = [one.replace(annotation=inspect.Parameter.empty) for one in actual.parameters.values()]
        shown = actual.replace(parameters=taken[bound:], return_annotation=inspect.Signature.empty)
        return f"is called with ({', '.join(expected)}), and takes {shown}"
    return None


def _parameters(value: object) -> tuple[str, ...] | None:
    """The names of a method's parameters, without self; None for anything else."""
    return tuple(inspect.signature(value).parameters)[1:] if isinstance(value, FunctionType) else None


def _code(module: ModuleType) -> CodeType | None:
    """The code of a loaded module; None if its loader has none, as for a module without a file."""
    get_code = getattr(getattr(vars(module).get("__spec__"), "loader", None), "get_code", None)
    try:
        found = get_code(module.__name__) if get_code is not None else None
    except (ImportError, OSError, SyntaxError):  # the file has changed or is gone
        return None
    return found if isinstance(found, CodeType) else None


_named: WeakKeyDictionary[ModuleType, _Named | None] = WeakKeyDictionary()
"""Names by loaded module: their code stays as it is, and a fork server reads it for all of its ranks."""


def _named_in(module: ModuleType) -> _Named | None:
    """The code of a loaded module, its functions and classes by the names in it; None if it can't be read."""
    if module not in _named:
        code, found = _code(module), _Named()
        for part in () if code is None else _parts(code):
            for name in part.co_names:
                found.setdefault(name, []).append(part)
        _named[module] = None if code is None else found
    return _named[module]


def _reads(code: CodeType, name: str) -> bool:
    return any(one.opname in _READS and one.argval == name for one in dis.get_instructions(code))


def _parts(code: CodeType) -> Iterator[CodeType]:
    """The code and that of the functions and classes in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)
