"""The watchdog's own way between the ranks: keys in the guarded store, over a connection of its own.

Only Python code: Python ends a thread that still waits when the program ends, and in the middle of C++ code, such as torch's
stores, this would abort the process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from hpctrain.ranks.meeting import World

PATIENCE = 5.0
"""Seconds for an answer of the store: rank 0 may hold the interpreter lock."""


class WatchdogChannel(Protocol):
    """Keys and values. Raises DistNetworkError when rank 0 is out of reach."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that are set."""

    def are_set(self, keys: Sequence[str]) -> bool: ...

    def comes(self, key: str, seconds: float) -> bool:
        """Whether the key is set within so many seconds."""

    def remove(self, key: str) -> None: ...

    def close(self) -> None: ...


def open_channel(world: World) -> WatchdogChannel:
    """The channel of this rank."""
    return LoneChannel() if world.guarded is None else SharedChannel(world)


class SharedChannel:
    """The channel of several ranks."""

    def __init__(self, world: World) -> None:
        assert world.guarded is not None  # there are several ranks
        self._store = world.guarded.another(PATIENCE)

    def set(self, key: str, value: str) -> None:
        self._store.set(_own(key), value)

    def get(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.multi_get([_own(key) for key in keys])

    def are_set(self, keys: Sequence[str]) -> bool:
        return self._store.check([_own(key) for key in keys])

    def comes(self, key: str, seconds: float) -> bool:
        try:
            self._store.wait([_own(key)], timedelta(seconds=seconds))
        except dist.DistStoreError:
            return False
        return True

    def remove(self, key: str) -> None:
        self._store.delete_key(_own(key))

    def close(self) -> None:
        self._store.close()


class LoneChannel:
    """The channel of a single rank."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, keys: Sequence[str]) -> list[bytes]:
        return [self._values[key].encode() for key in keys]

    def are_set(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def comes(self, key: str, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: key in self._values, seconds)

    def remove(self, key: str) -> None:
        self._values.pop(key, None)

    def close(self) -> None:
        """Close nothing: there is nothing to close."""


def end_waiting_ranks(world: World, code: int) -> None:
    """Have the ranks end with `code` that do not notice this one's failure: a wait in NCCL lasts until its own limit."""
    store = world.guarded
    assert store is not None  # there are several ranks
    with contextlib.suppress(RuntimeError):  # rank 0 has ended
        if world.identity.rank == 0:  # its Monitor, which gives the orders else, has ended
            keys = (_own(f"order/{number}") for number in itertools.count(1))
            unused = next(key for key in keys if not store.check([key]))
            store.set(unused, json.dumps({"kind": "end", "code": code}))
        else:
            store.set(_own("alarm"), json.dumps({"code": code}))


def _own(key: str) -> str:
    return f"watchdog/{key}"
