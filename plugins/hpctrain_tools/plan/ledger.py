"""The memory of a device over a step: each storage from birth to death, and which of them lived at the peak."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain_tools.plan.torch_fake import local_tensors, storage_number

# bytes to which torch's allocators of accelerators round
_BLOCK = 512


class Origin(NamedTuple):
    """The module whose forward made a tensor, "" in backward and outside; and the operator."""

    module: str
    operator: str


class _Life:
    """The memory of a storage: bytes, and between which events it lived."""

    __slots__ = ("birth", "death", "ident", "nbytes", "origin")

    def __init__(self, ident: int, birth: int, nbytes: int, origin: Origin) -> None:
        self.ident, self.birth, self.death, self.nbytes, self.origin = ident, birth, -1, nbytes, origin


class Ledger:
    """The storages that live, and those that have ended since `begin`. peak: the most bytes that lived at once since then."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._alive: dict[int, _Life] = {}
        self._ended: list[_Life] = []
        self._events = self._at_peak = self._now = self.peak = 0

    def begin(self) -> None:
        """Look for a new peak from here on."""
        self._ended.clear()
        self.peak, self._at_peak = self._now, self._events

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage lives here, or was seen with no size since."""
        return storage_number(storage) in self._seen

    def see(self, storage: torch.UntypedStorage, origin: Origin) -> None:
        """Note a storage that is new, or that has another size now."""
        ident, nbytes = storage_number(storage), -(-storage.nbytes() // _BLOCK) * _BLOCK
        known = self._alive.get(ident)
        if known is not None and known.nbytes == nbytes:
            return
        if known is not None:
            self._end(ident)
        if ident not in self._seen:
            self._seen.add(ident)
            weakref.finalize(storage, self._forget, ident).atexit = False
        if not nbytes:
            return
        self._events += 1
        self._alive[ident] = _Life(ident, self._events, nbytes, origin)
        self._now += nbytes
        if self._now > self.peak:
            self.peak, self._at_peak = self._now, self._events

    def at_peak(self, of: Mapping[str, Iterable[Tensor]], others: str) -> dict[str, int]:
        """The peak's bytes by what they are of; `others` names those of no tensor in `of`, kept or not."""
        names = _names(of)
        found: Counter[str] = Counter(dict.fromkeys([*of, others], 0))
        for life in self._living_at_peak():
            found[self._name(life, names, others)] += life.nbytes
        return dict(found)

    def origins_at_peak(self, of: Mapping[str, Iterable[Tensor]]) -> Counter[Origin]:
        """The peak's bytes that are of no tensor in `of`, by their origin."""
        names, found = _names(of), Counter[Origin]()
        for life in self._living_at_peak():
            if not self._name(life, names, ""):
                found[life.origin] += life.nbytes
        return found

    def _living_at_peak(self) -> Iterable[_Life]:
        for life in [*self._ended, *self._alive.values()]:
            if life.birth <= self._at_peak and (life.death < 0 or life.death > self._at_peak):
                yield life

    @staticmethod
    def _name(life: _Life, names: Mapping[int, str], others: str) -> str:
        return names.get(life.ident, others) if life.death < 0 else others

    def _forget(self, ident: int) -> None:
        self._seen.discard(ident)
        self._end(ident)

    def _end(self, ident: int) -> None:
        life = self._alive.pop(ident, None)
        if life is not None:
            self._events += 1
            life.death = self._events
            self._now -= life.nbytes
            self._ended.append(life)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The bytes of the tensors' storages on this rank, each once."""
    storages = (one.untyped_storage() for one in flat_locals(tensors))
    return sum({storage_number(one): one.nbytes() for one in storages}.values())


def flat_locals(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    """The tensors, and of those that are spread over ranks this rank's parts."""
    for tensor in tensors:
        yield from local_tensors(tensor)


def _names(of: Mapping[str, Iterable[Tensor]]) -> dict[int, str]:
    return {storage_number(one.untyped_storage()): name for name, tensors in of.items() for one in flat_locals(tensors)}
