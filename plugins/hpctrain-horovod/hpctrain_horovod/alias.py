"""`import horovod` as another name of `hpctrain_horovod`, for scripts that are not to be changed.

The modules are the same objects under both names.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

NAME, TARGET = "horovod", "hpctrain_horovod"
_HIDDEN = ("alias", "commands", "communicator", "engine", "starter", "top_level", "__main__")
"""Modules that Horovod does not have."""
DIRECTORY = str(Path(__file__).with_name("top_level"))
"""An entry of sys.path from which `import horovod` finds hpctrain_horovod."""


class _Loader(Loader):
    def __init__(self, target: str) -> None:
        self._target = target
        self._spec: Any = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._target)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has replaced it by the other name's


class Finder(MetaPathFinder):
    """Finds `horovod` and the modules below it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module of hpctrain_horovod for a name below horovod; None for others."""
        first, _, rest = fullname.partition(".")
        if first != NAME:
            return None
        if rest.split(".")[0] in _HIDDEN:
            raise ModuleNotFoundError(f"Horovod has no module {fullname}", name=fullname)
        wanted = TARGET + fullname[len(NAME) :]
        if importlib.util.find_spec(wanted) is None:
            return None
        return ModuleSpec(fullname, _Loader(wanted), is_package=hasattr(importlib.import_module(wanted), "__path__"))


def install() -> None:
    """Let `import horovod` give hpctrain_horovod in this process, whatever is installed. Idempotent."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())


def hand_down() -> None:
    """Install the alias in the Python processes that this one starts, too. Idempotent.

    Those of multiprocessing begin with a copy of sys.path, also where they are forked from a server; all others read PYTHONPATH.
    """
    if DIRECTORY not in sys.path:
        sys.path.insert(1, DIRECTORY)  # behind the script's own directory
    others = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry not in ("", DIRECTORY)]
    os.environ["PYTHONPATH"] = os.pathsep.join([DIRECTORY, *others])
