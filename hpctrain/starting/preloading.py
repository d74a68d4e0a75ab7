"""Imports in the fork server what its ranks need, and finds out after each import whether ranks may still be forked."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from hpctrain.base.errors import HpctrainError
from hpctrain.base.torch_private import delay_compiler
from hpctrain.plugins.discovery import import_from_here
from hpctrain.plugins.entry_points import RAISED, entry_points
from hpctrain.plugins.registry import OWN, build_registry
from hpctrain.starting.footprint import Footprint, watched

_LATE = (
    "hpctrain.starting.channel_directory", "hpctrain.ranks.failure", "hpctrain.ranks.watchdog.watch", "hpctrain.base.store.gloo",
    "encodings.idna", "encodings.utf_8_sig",
)  # fmt: skip
"""Modules that a rank imports on its way to the first step, besides those that importing `hpctrain.training.rank` imports."""
_OWN = "hpctrain and torch"


@dataclass(frozen=True)
class Wanted:
    """The imports of a command's ranks. load, block: of [plugins]. modules: those of the job's callables."""

    command: str
    load: Sequence[str] = ()
    block: Sequence[str] = ()
    modules: Sequence[str] = ()


def preload(wanted: Wanted, begin: Callable[[str], None]) -> str | None:
    """Import; a sentence if ranks must not be forked after that, else None.

    begin: told what is imported next, since an import may end this process, or never end.
    """
    begin(_OWN)
    start = Footprint()
    gc.disable()  # until all is there that nobody collects
    _import_own(wanted.command)
    gc.freeze()  # a collection during the user's imports would look through all of torch
    gc.enable()
    why = _sentence(_OWN, start.hindrances())
    for name in _others(wanted):
        why = why or _import_observed(name, partial(import_from_here, name), begin)
    # once for all ranks: it reads the code of all plugins
    return why or _import_observed("the installed plugins", partial(build_registry, wanted.load, wanted.block), begin)


def _import_own(command: str) -> None:
    for name in (f"hpctrain.cli.{command}", "hpctrain.training.rank", *_LATE):
        importlib.import_module(name)
    delay_compiler()
    with suppress(ImportError, RuntimeError):  # without MPI the ranks talk over gloo
        import mpi4py

        mpi4py.rc.initialize = False  # a rank starts MPI itself
        importlib.import_module("mpi4py.MPI")
    for source in entry_points():
        if source.distribution == OWN:
            with suppress(*RAISED):  # the ranks report it
                importlib.import_module(source.module)


def _others(wanted: Wanted) -> list[str]:
    """The modules of third parties and of the job, in the order in which a rank imports them."""
    plugins = [one for one in entry_points() if one.command is None and not one.names & set(wanted.block)]
    installed = sorted(plugins, key=lambda one: (one.distribution, one.entry_point))
    active = [one.module for one in installed if one.distribution != OWN]
    named = [name for name in wanted.load if name not in wanted.block]
    return list(dict.fromkeys([*active, *named, *wanted.modules]))


def _import_observed(name: str, work: Callable[[], object], begin: Callable[[str], None]) -> str | None:
    """Do `work`; a sentence if it has left something that forked ranks would share or lack."""
    begin(name)
    before = Footprint()
    with watched() as seen, suppress(*RAISED, HpctrainError):  # the ranks import it again, and report it
        work()
    return _sentence(name, [*before.hindrances(), *before.differences(seen)])


def _sentence(name: str, found: Sequence[str]) -> str | None:
    return f"the import of {name} {' and '.join(found)}" if found else None
