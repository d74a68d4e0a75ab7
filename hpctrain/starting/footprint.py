"""Finds what an import has left in the process besides modules, and ranks forked from it would share or lack. Linux only."""

from __future__ import annotations

import os
import random
import re
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpctrain.base.devices import is_started
from hpctrain.base.launcher_variables import OF_A_RANK, OF_LAUNCHERS, OF_MPIEXEC
from hpctrain.ranks import process

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/hl", "/dev/neuron")
_SHARED = {
    "socket:": "opened a socket",
    "pipe:": "opened a pipe",
    "anon_inode:[eventpoll]": "started an event loop",
    "anon_inode:[eventfd]": "opened an event descriptor",
    "anon_inode:inotify": "watches files",
}
_SELF = Path("/proc/self")


class Footprint:
    """The process as it is now, to be compared with a later one."""

    def __init__(self) -> None:
        self._modules = set(sys.modules)
        self._opened = set(_descriptors())
        self._memory = _shared_memory()
        self._children = _children()
        self._directory = os.getcwd()
        self._numbers = _random_states()

    def hindrances(self) -> list[str]:
        """Reasons against a fork, as ends of the sentence "the import of M ..."."""
        found = []
        count = _threads_left()
        if count:
            found.append("started a thread" if count == 1 else f"started {count} threads")
        opened = [one for one in _descriptors() if one not in self._opened]
        places = [place for _, place in opened]
        found += [text for start, text in _SHARED.items() if any(place.startswith(start) for place in places)]
        files = [place for descriptor, place in opened if _has_place_in(descriptor)]
        if files:
            found.append(f"keeps the file {files[0]} open, in which ranks would have one position")
        if _shared_memory() - self._memory:
            found.append("made memory that processes share")
        if is_started() or any(place.startswith(_DEVICES) for place in places):
            found.append("initialized an accelerator")
        mpi: Any = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized():
            found.append("initialized MPI")
        if _children() - self._children:
            found.append("started a process")
        return found

    def differences(self, seen: Seen) -> list[str]:
        """Values that would differ in each rank, or would not be in effect there, as `hindrances` tells."""
        found = []
        if os.getcwd() != self._directory:
            found.append("changed the current directory")
        now = _random_states()
        if any(now[name] != state for name, state in self._numbers.items()):
            found.append("drew or seeded random numbers")
        named = self._process_numbers() if seen.process_number else []
        if named:
            found.append(f"keeps the number of its process in {named[0]}")
        if seen.mpi:
            found.append("asks whether MPI has started, which it has in a rank")
        if seen.variables:
            found.append(f"reads or sets {', '.join(seen.variables)}, of which each rank has its own")
        return found

    def _process_numbers(self) -> list[str]:
        """Names in new modules whose value is this process's number."""
        pid, found = os.getpid(), []
        for name in sys.modules.keys() - self._modules:
            values = getattr(sys.modules[name], "__dict__", {})
            found += [f"{name}.{key}" for key, value in list(values.items()) if type(value) is int and value == pid]
        return sorted(found)


@dataclass
class Seen:
    """Questions of code that have another answer in a rank. variables: those of a rank that it reads before they have its value, or
    sets before the rank looks at them."""

    variables: list[str] = field(default_factory=list)
    process_number: bool = False
    mpi: bool = False

    def variable(self, key: object, names: tuple[str, ...]) -> None:
        """Note a variable whose name begins so."""
        if isinstance(key, str) and key.startswith(names) and key not in self.variables:
            self.variables.append(key)


@contextmanager
def watched() -> Iterator[Seen]:
    """See what the code in this context asks."""
    seen = Seen()
    with _watched_variables(seen), ExitStack() as replaced:
        for module, name, mark in (("os", "getpid", "process_number"), ("mpi4py.MPI", "Is_initialized", "mpi")):
            if module in sys.modules:
                replaced.enter_context(_noted(sys.modules[module], name, partial(setattr, seen, mark, True)))
        yield seen


@contextmanager
def _watched_variables(seen: Seen) -> Iterator[None]:
    kind: Any = type(os.environ)

    class Watched(kind):  # type: ignore[misc]
        def __getitem__(self, key: str) -> str:
            seen.variable(key, OF_A_RANK)
            value = str(super().__getitem__(key))
            seen.variable(key, OF_MPIEXEC)  # it is set: in this process, to the first rank's value
            return value

        def __contains__(self, key: object) -> bool:
            seen.variable(key, OF_A_RANK)
            found = bool(super().__contains__(key))
            if found:
                seen.variable(key, OF_MPIEXEC)
            return found

        def __setitem__(self, key: str, value: str) -> None:
            seen.variable(key, OF_LAUNCHERS)
            super().__setitem__(key, value)

    environment: Any = os.environ
    environment.__class__ = Watched
    try:
        yield
    finally:
        environment.__class__ = kind


@contextmanager
def _noted(module: Any, name: str, note: Callable[[], None]) -> Iterator[None]:
    """Note calls of a function while it is looked up in its module."""
    function = getattr(module, name)

    def noting(*arguments: Any) -> Any:
        note()
        return function(*arguments)

    setattr(module, name, noting)
    try:
        yield
    finally:
        setattr(module, name, function)


def _threads_left() -> int:
    """Threads besides this one that a fork does not end: OpenBLAS ends its own before a fork, and starts them again on use."""
    if len(os.listdir(_SELF / "task")) == 1:
        return 0
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return process.other_threads()


def _descriptors() -> list[tuple[str, str]]:
    """Each open descriptor and what it refers to."""
    found = []
    for name in os.listdir(_SELF / "fd"):
        with suppress(OSError):  # the one of this listing
            found.append((name, os.readlink(_SELF / "fd" / name)))
    return found


def _has_place_in(descriptor: str) -> bool:
    """Whether it is a file's in which reads and writes move a position: not one that is only appended to."""
    try:
        is_file = stat.S_ISREG(os.stat(int(descriptor)).st_mode)
        flags = re.search(r"^flags:\s*(\d+)", (_SELF / "fdinfo" / descriptor).read_text(), re.MULTILINE)
    except OSError:  # it was closed meanwhile
        return False
    return is_file and flags is not None and not int(flags[1], 8) & os.O_APPEND


def _shared_memory() -> set[str]:
    """The writable mappings that a forked process would share."""
    lines = (line.split() for line in (_SELF / "maps").read_text().splitlines())
    return {words[0] for words in lines if words[1][1] == "w" and words[1][3] == "s"}


def _children() -> set[str]:
    with suppress(OSError):  # the kernel was built without it
        return set((_SELF / "task" / str(os.getpid()) / "children").read_text().split())
    return set()


def _random_states() -> dict[str, Any]:
    """The states of the random numbers that a rank does not begin anew with each use."""
    of_numpy: Any = np.random.get_state(legacy=False)
    return {
        "random": random.getstate(),
        "numpy": {**of_numpy, "state": {key: np.asarray(value).tobytes() for key, value in of_numpy["state"].items()}},
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
