"""What an import has left in the process besides modules, and ranks forked from it would share or lack. Linux only."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpctrain.devices import is_started
from hpctrain.world import threads

_GIVEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PMI_", "MPI_LOCAL", "HPCTRAIN_STARTED_IN")
"""Beginnings of variables that a rank gets after the fork."""
_OF_LAUNCHERS = (
    *_GIVEN,
    "MASTER_ADDR",
    "MASTER_PORT",
    "PMIX_",
    "OMPI_COMM_",
    "SLURM_",
    "FLUX_",
    "PALS_",
    "TORCHELASTIC_",
)
"""Those by which a rank finds out how it was started."""
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/hl", "/dev/neuron")
_SHARED = {"socket:": "opened a socket", "anon_inode:[eventpoll]": "started an event loop"}
_SELF = Path("/proc/self")


class Footprint:
    """The process as it is now, to be compared with a later one."""

    def __init__(self) -> None:
        self._modules = set(sys.modules)
        self._opened = set(_descriptors())
        self._children = _children()
        self._directory = os.getcwd()
        self._numbers = _random_states()

    def hindrances(self) -> list[str]:
        """What forbids a fork, as ends of the sentence "the import of M ..."."""
        found = []
        count = _threads_left()
        if count:
            found.append("started a thread" if count == 1 else f"started {count} threads")
        opened = [place for descriptor, place in _descriptors() if (descriptor, place) not in self._opened]
        found += [text for start, text in _SHARED.items() if any(place.startswith(start) for place in opened)]
        if is_started() or any(place.startswith(_DEVICES) for place in opened):
            found.append("initialized an accelerator")
        mpi: Any = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized():
            found.append("initialized MPI")
        if _children() - self._children:
            found.append("started a process")
        return found

    def differences(self) -> list[str]:
        """What would be another value in each rank, or would not be in effect there, as `hindrances`."""
        found = []
        if os.getcwd() != self._directory:
            found.append("changed the current directory")
        now = _random_states()
        if any(now[name] != state for name, state in self._numbers.items()):
            found.append("drew or seeded random numbers")
        named = self._process_numbers()
        if named:
            found.append(f"keeps the number of its process in {named[0]}")
        return found

    def _process_numbers(self) -> list[str]:
        """Names in new modules whose value is this process's number."""
        pid, found = os.getpid(), []
        for name in sys.modules.keys() - self._modules:
            values = getattr(sys.modules[name], "__dict__", {})
            found += [f"{name}.{key}" for key, value in list(values.items()) if type(value) is int and value == pid]
        return sorted(found)


@contextmanager
def variables_of_ranks() -> Iterator[list[str]]:
    """The variables of a rank that are read in this context, before they have its value, or set, before it looks at them."""
    touched: list[str] = []
    kind: Any = type(os.environ)

    class Watched(kind):  # type: ignore[misc]
        def __getitem__(self, key: str) -> str:
            _note(key, _GIVEN, touched)
            return str(super().__getitem__(key))

        def __contains__(self, key: object) -> bool:
            _note(key, _GIVEN, touched)
            return bool(super().__contains__(key))

        def __setitem__(self, key: str, value: str) -> None:
            _note(key, _OF_LAUNCHERS, touched)
            super().__setitem__(key, value)

    environment: Any = os.environ
    environment.__class__ = Watched
    try:
        yield touched
    finally:
        environment.__class__ = kind


def _note(key: object, names: tuple[str, ...], touched: list[str]) -> None:
    if isinstance(key, str) and key.startswith(names) and key not in touched:
        touched.append(key)


def _threads_left() -> int:
    """Threads besides this one that a fork does not end: OpenBLAS ends its own before a fork, and starts them again on use."""
    if len(os.listdir(_SELF / "task")) == 1:
        return 0
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return threads.others()


def _descriptors() -> list[tuple[str, str]]:
    """Each open descriptor and what it refers to."""
    found = []
    for name in os.listdir(_SELF / "fd"):
        with suppress(OSError):  # the one of this listing
            found.append((name, os.readlink(_SELF / "fd" / name)))
    return found


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
