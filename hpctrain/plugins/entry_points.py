"""Plugin modules by their entry points, of the group `hpctrain`, and their import. Without torch and pydantic, for the help.

Somebody else's module may raise anything when it is imported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType, ModuleType

from hpctrain.plugins.hookspecs import PROJECT
from hpctrain.version import API_VERSION

COMMAND = "command"
"""The begin of the name of a command's entry point, "command.NAME"."""


@dataclass(frozen=True)
class ModuleSource:
    """The origin of a plugin module."""

    module: str
    distribution: str = ""
    version: str = ""
    entry_point: str = ""
    """The entry point's name; by convention "slot.name", so that a broken module still shows what it would provide."""

    @property
    def command(self) -> str | None:
        """The command that the module provides, such as "bench mine" for "command.bench.mine"; None for other modules."""
        kind, _, path = self.entry_point.partition(".")
        return path.replace(".", " ") if kind == COMMAND and self.distribution else None

    @property
    def slot(self) -> str:
        """The begin of the entry point's name."""
        return self.entry_point.partition(".")[0]

    @property
    def key(self) -> str:
        """The module's name in pluggy."""
        return f"{self.distribution}:{self.entry_point}" if self.distribution else self.module

    @property
    def names(self) -> set[str]:
        """The module's names in [plugins] block."""
        return {name for name in (self.entry_point, self.module, self.distribution) if name}

    def __str__(self) -> str:
        if not self.distribution:
            return f"{self.module} ([plugins] load)"
        return f"{self.module} ({self.distribution} {self.version}, entry point {self.entry_point!r})"


def entry_points() -> Iterator[ModuleSource]:
    """Every installed entry point of the group, in a fixed order. A distribution found twice counts once."""
    seen = set()
    for distribution in importlib.metadata.distributions():
        points = [point for point in distribution.entry_points if point.group == PROJECT]
        if not points:
            continue  # most have none, and their metadata is long
        metadata = distribution.metadata  # parsed anew each time
        name = metadata["Name"]
        for point in points:
            if (name, point.name) not in seen:
                seen.add((name, point.name))
                yield ModuleSource(point.value, name, metadata["Version"], point.name)


def usable_module(source: ModuleSource, load: Callable[[str], ModuleType]) -> ModuleType | str:
    """The module, from `load`; a sentence if it cannot be imported or asks for another version of the interface."""
    try:
        module = load(source.module)
    except ImportError as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and missing != source.module and not source.module.startswith(f"{missing}."):
            return f"it needs the package {missing!r}, which is not installed ({error})"
        return f"the module cannot be imported: {error}"
    except Interrupted:
        raise
    except RAISED as error:  # a third party's import must not end the command
        return f"importing it raised {type(error).__name__}: {error}"
    wanted = getattr(module, "HPCTRAIN_API", None)  # the version of the interface that it was written for
    if wanted is not None and (type(wanted) is not int or wanted > API_VERSION):
        return f"it asks for plugin API version {wanted!r}, and this hpctrain has version {API_VERSION}: install a newer hpctrain"
    return module


RAISED = (Exception, SystemExit, GeneratorExit, KeyboardInterrupt)
"""Exceptions that a module of somebody else's may raise at its import."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during an import, in contrast to a module that raises KeyboardInterrupt itself."""


def imported(module: str) -> ModuleType:
    """Import a module of somebody else's. Raises Interrupted, and whatever the module raises."""
    answered = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not answered or threading.current_thread() is not threading.main_thread():
        return importlib.import_module(module)
    signal.signal(signal.SIGINT, _interrupt)
    try:
        return importlib.import_module(module)
    finally:
        if signal.getsignal(signal.SIGINT) is _interrupt:  # the module may have taken the signal
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted
