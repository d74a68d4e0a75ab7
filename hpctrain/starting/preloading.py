"""Imports torch, hpctrain and its own plugins, once for all ranks of a node that are forked afterwards.

Modules of the job and of other packages are left to the ranks: what they do at their import, such as a look at RANK, they do in
each of them.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from contextlib import suppress
from typing import Any

from hpctrain.base.devices import is_started
from hpctrain.base.torch_private import delay_compiler
from hpctrain.plugins.entry_points import RAISED, entry_points
from hpctrain.plugins.registry import OWN
from hpctrain.plugins.slots import OPTIONAL
from hpctrain.ranks import process

_LATE = (
    "hpctrain.starting.channel_directory", "hpctrain.ranks.failure", "hpctrain.ranks.watchdog.watch", "hpctrain.base.store.gloo",
    "encodings.idna", "encodings.utf_8_sig",
)  # fmt: skip
"""Modules that a rank imports on its way to the first step, besides those that importing `hpctrain.training.rank` imports."""


def preload(command: str) -> str | None:
    """Import what ranks of a command need; a sentence if they must not be forked after that, else None."""
    gc.disable()  # nothing of this is ever garbage
    ours = [one for one in entry_points() if one.distribution == OWN]  # once: to look through all packages takes long
    offered = next((one for one in ours if one.command == command), None)  # a tool
    for name in (f"hpctrain.cli.{command}" if offered is None else offered.module, "hpctrain.training.rank", *_LATE):
        importlib.import_module(name)
    delay_compiler()
    with suppress(ImportError, RuntimeError):  # without MPI the ranks talk over gloo
        import mpi4py

        mpi4py.rc.initialize = False  # a rank starts MPI itself
        importlib.import_module("mpi4py.MPI")
    for source in ours:
        if source.command is None and source.slot not in OPTIONAL:
            with suppress(*RAISED):  # the ranks report it
                importlib.import_module(source.module)
    mpi: Any = sys.modules.get("mpi4py.MPI")
    found = {
        "started threads": _has_threads(),
        "initialized an accelerator": is_started(),
        "initialized MPI": mpi is not None and mpi.Is_initialized(),
    }
    why = next((text for text, is_so in found.items() if is_so), None)
    return None if why is None else f"the import of torch and hpctrain {why}"


def _has_threads() -> bool:
    """Whether a fork would lose threads: not those of OpenBLAS, which ends its own before a fork and starts them again on use."""
    if len(os.listdir("/proc/self/task")) == 1:
        return False
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return process.other_threads() > 0
